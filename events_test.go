// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

func TestWatched(t *testing.T) {
	decided := func(mode, outcome string, n uint64) counted {
		return counted{map[string]string{"pool": "api", "kind": "rate", "limit": "rate", "mode": mode, "outcome": outcome}, n}
	}
	rows := []struct {
		after    time.Duration // since the start
		rejected uint64
		level    shedding.Level
		want     string
	}{
		{0, 100, 0, ""}, // what was before we looked is no news
		{1 * time.Second, 100, -0.2, ""},
		{2 * time.Second, 101, 0, "limit_triggered rate"},
		{3 * time.Second, 150, 0, ""},
		{30 * time.Second, 151, 0.01, "shed_level_changed none>test_mode"},
		{31 * time.Second, 151, 0.33, ""},
		{32 * time.Second, 151, 0.34, "shed_level_changed test_mode>get"},
		{33 * time.Second, 151, 1, "shed_level_changed get>post"},
		{89 * time.Second, 151, 1, ""},
		{90 * time.Second, 151, 1, "limit_cleared rate"},
		{91 * time.Second, 151, -0.1, "shed_level_changed post>none"},
		{500 * time.Second, 151, 0, ""},
		{501 * time.Second, 152, 0, "limit_triggered rate"},
	}
	var w watched
	start := time.Unix(0, 0)
	for _, row := range rows {
		var got []string
		for _, e := range w.step(start.Add(row.after),
			[]counted{decided("enforce", "allowed", row.rejected*7), decided("enforce", "denied", row.rejected), decided("dark", "denied", row.rejected*3)},
			map[string]shedding.Level{"api": row.level}) {
			if text := e.name + " " + fmt.Sprint(e.data["limit"]); e.name != eventShedLevel {
				got = append(got, text)
			} else {
				got = append(got, fmt.Sprintf("%s %v>%v", e.name, e.data["before"], e.data["sheds"]))
			}
		}
		if text := strings.Join(got, ", "); text != row.want {
			t.Errorf("at %v: got %q, want %q", row.after, text, row.want)
		}
	}
}

func init() {
	caddy.RegisterModule(new(recorder))
}

// recorder is a handler of events that keeps what it is told.
type recorder struct{}

var recorded struct {
	sync.Mutex
	events []string
}

func (*recorder) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.test_recorder", New: func() caddy.Module { return new(recorder) }}
}

func (*recorder) UnmarshalCaddyfile(*caddyfile.Dispenser) error { return nil }

func (*recorder) Handle(ctx context.Context, e caddy.Event) error {
	repl := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	recorded.Lock()
	defer recorded.Unlock()
	recorded.events = append(recorded.events, e.Name()+repl.ReplaceAll(" {event.data.node}{event.data.target} {event.data.action}{event.data.kind}", "-"))
	return nil
}

// saw waits for an event.
func saw(t *testing.T, want string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("want %q, got %q", want, recorded.events)
		}
	}()
	eventually(t, func() bool {
		recorded.Lock()
		defer recorded.Unlock()
		return slices.Contains(recorded.events, want)
	})
}

func TestEvents(t *testing.T) {
	recorded.events = nil
	s := newServer(t)
	redis := redistest.Start(t)
	s.load(app(redis)+`
	events {
		on limit_triggered test_recorder
		on store_down test_recorder
		on store_up test_recorder
		on switch_changed test_recorder
	}`, testPools)
	eventually(t, func() bool { // once it has been looked at for the first time
		s.get("k")
		recorded.Lock()
		defer recorded.Unlock()
		return len(recorded.events) > 0
	})
	saw(t, "limit_triggered -- -rate")
	mustAsk(t, "POST", "switches", `{"pool":"api","mode":"dark","ttl":"1h","reason":"test"}`)
	saw(t, "switch_changed -api set-")
	mustAsk(t, "DELETE", "switches", `{"pool":"api"}`)
	saw(t, "switch_changed -api cleared-")
	redis.Kill()
	saw(t, "store_down "+redis.Addr+"- --")
	redis.Restart()
	saw(t, "store_up "+redis.Addr+"- --")
}

// While Caddy stops it knows no context any more, but its apps still run.
func TestTellCaddy_Stopping(t *testing.T) {
	runningHandler(t, &ample)
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	tellCaddy(event{name: eventStoreUp}) // must not panic
}
