// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// soon is how long a test waits for what happens within two beats, half a second,
// on a machine that is not busy.
const soon = 20 * time.Second

// instance is a controller as a process has it.
type instance struct {
	*controller
	store *limiters.Redis
	logs  *observer.ObservedLogs
	close func()
}

// How soon a change is in force everywhere depends on the number of instances.
func TestController_Soon(t *testing.T) {
	for beat, want := range map[time.Duration]string{0: "half a second", 250: "half a second", 252: "1s", 500: "1s", 4000: "8s", 4004: "9s"} {
		c := newController(nil, limiters.NewDenials(), "place", "secret", nil)
		if beat > 0 {
			c.beat.Store(int64(beat * time.Millisecond))
		}
		if got := c.soon(); got != want {
			t.Errorf("a beat of %d ms: got %q, want %q", beat, got, want)
		}
	}
}

// newInstance starts an instance on a Redis, nil for memory, whose storage is a
// folder.
func newInstance(t *testing.T, addr, folder, secret string) *instance {
	t.Helper()
	i := new(instance)
	if addr != "" {
		i.store = limiters.NewRedis(limiters.RedisOptions{Universal: redis.UniversalOptions{Addrs: []string{addr}}, Timeout: time.Second})
	}
	storage := &certmagic.FileStorage{Path: folder}
	i.controller = newController(i.store, limiters.NewDenials(), "place", secret, storage)
	core, logs := observer.New(zap.InfoLevel)
	i.controller.logger, i.logs = zap.New(core), logs
	i.controller.start(storage)
	closed := false
	i.close = func() {
		if !closed {
			closed = true
			i.controller.close()
			if i.store != nil {
				_ = i.store.Close()
			}
		}
	}
	t.Cleanup(i.close)
	return i
}

// set sets a switch and returns what is still to be done.
func (i *instance) set(t *testing.T, pool string, mode control.Mode, ttl time.Duration) error {
	t.Helper()
	s := control.Switch{Target: control.Target{Pool: pool}, Mode: mode, Scope: control.Fleet, Note: control.Note{Reason: "a test", Actor: "me"}}
	pending, err := i.change(t.Context(), false, control.Change{Set: &s, TTL: ttl})
	if err != nil {
		t.Fatalf("set %s: %v", pool, err)
	}
	if reason := limiters.Reason(pending); pending != nil && (reason == "timeout" || reason == "late") {
		until(t, "the write that a busy machine was late with", func() bool {
			i.mu.Lock()
			defer i.mu.Unlock()
			return i.keeper.Waiting() == 0
		})
		return nil
	}
	return pending
}

func (i *instance) mode(pool string) control.Mode { return i.inForce().mode(pool, "rate", "rate") }

// until waits for what the background does soon.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(soon); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen within %v", what, soon)
		}
	}
}

func TestController_Fleet(t *testing.T) {
	srv := redistest.Start(t)
	folders := []string{t.TempDir(), t.TempDir()}
	a, b := newInstance(t, srv.Addr, folders[0], "s"), newInstance(t, srv.Addr, folders[1], "s")

	if pending := a.set(t, "api", control.Dark, time.Hour); pending != nil {
		t.Errorf("set: %v", pending)
	}
	if got := a.mode("api"); got != control.Dark {
		t.Errorf("where it was set: got %s, want dark at once", got)
	}
	until(t, "dark on the other", func() bool { return b.mode("api") == control.Dark })
	if got := b.mode("edge"); got != control.Enforce {
		t.Errorf("another pool: got %s, want enforce", got)
	}
	until(t, "both count each other", func() bool { return a.instances.Load() == 2 && b.instances.Load() == 2 })

	told := b.logs.FilterMessage("switch set").All()
	if len(told) != 1 {
		t.Fatalf("the other told %d times of it, want once: %v", len(told), b.logs.All())
	}
	fields := told[0].ContextMap()
	for key, want := range map[string]any{"target": "api", "mode": "dark", "scope": "fleet", "reason": "a test", "actor": "me", "via": "store"} {
		if fields[key] != want {
			t.Errorf("log field %s: got %v, want %v", key, fields[key], want)
		}
	}

	// Both restart while Redis has nothing more to say.
	b.close()
	until(t, "one is left", func() bool { return a.instances.Load() == 1 })
	a.close()
	srv.Kill()
	a, b = newInstance(t, srv.Addr, folders[0], "s"), newInstance(t, srv.Addr, folders[1], "s")
	if a.mode("api") != control.Dark || b.mode("api") != control.Dark {
		t.Errorf("after a restart without Redis: got %s and %s, want dark", a.mode("api"), b.mode("api"))
	}
	if pending := a.set(t, "edge", control.Off, time.Hour); pending == nil {
		t.Error("set without Redis: want to be told that the others do not know it")
	}
	if got := a.mode("edge"); got != control.Off {
		t.Errorf("set without Redis: got %s, want off here", got)
	}
	a.close() // before it could tell anybody
	a = newInstance(t, srv.Addr, folders[0], "s")
	if got := a.mode("edge"); got != control.Off {
		t.Errorf("set without Redis, and restarted: got %s, want off", got)
	}
	srv.Restart() // empty
	until(t, "off on the other, too", func() bool { return b.mode("edge") == control.Off })
	if a.mode("api") != control.Dark || b.mode("api") != control.Dark {
		t.Errorf("Redis came back empty: got %s and %s, want dark as before", a.mode("api"), b.mode("api"))
	}
	until(t, "all is in Redis again", func() bool {
		text := srv.Client().HGet(context.Background(), "stripe_ratelimit:{control}", "state").Val()
		return strings.Contains(text, `"api"`) && strings.Contains(text, `"edge"`)
	})

	if err := srv.Client().FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	until(t, "the loss is noticed", func() bool {
		return a.logs.FilterMessageSnippet("has lost switches").Len()+b.logs.FilterMessageSnippet("has lost switches").Len() > 0
	})
	fresh := newInstance(t, srv.Addr, t.TempDir(), "s")
	until(t, "a new instance knows all", func() bool { return fresh.mode("api") == control.Dark && fresh.mode("edge") == control.Off })
	if a.mode("api") != control.Dark || b.mode("edge") != control.Off {
		t.Errorf("after FLUSHALL: got %s and %s, want dark and off", a.mode("api"), b.mode("edge"))
	}

	if _, err := b.change(t.Context(), false, control.Change{ClearAll: true}); err != nil {
		t.Fatal(err)
	}
	for _, i := range []*instance{a, b, fresh} {
		until(t, "all cleared", func() bool { return i.inForce() == nil })
	}
}

// A switch ends at its TTL by itself, with Redis and without.
func TestController_Expires(t *testing.T) {
	srv := redistest.Start(t)
	instances := []*instance{
		newInstance(t, srv.Addr, t.TempDir(), "s"), newInstance(t, srv.Addr, t.TempDir(), "s"), newInstance(t, "", t.TempDir(), "s"),
	}
	start := time.Now()
	var ends [3]time.Time
	for _, i := range []int{0, 2} {
		if pending := instances[i].set(t, "api", control.Off, control.MinTTL); pending != nil {
			t.Fatalf("set: %v", pending)
		}
		for _, e := range instances[i].logs.FilterMessage("switch set").All() {
			ends[i] = e.ContextMap()["until"].(time.Time)
		}
		// The clock of a Redis whose answer comes late seems to be behind.
		if early := start.Add(control.MinTTL).Sub(ends[i]); early >= control.MinTTL {
			t.Errorf("instance %d: the end is %v early", i, early)
		}
	}
	ends[1] = ends[0]
	until(t, "off on the other", func() bool {
		return instances[1].mode("api") == control.Off || time.Since(start) > control.MinTTL
	})
	for n, i := range instances {
		until(t, "its end", func() bool { return i.inForce() == nil })
		if early := time.Until(ends[n]); early > 10*time.Millisecond {
			t.Errorf("instance %d: it ended %v before its end", n, early)
		}
	}
	if n := instances[2].logs.FilterMessage("switch expired").Len(); n != 1 {
		t.Errorf("its end was told %d times, want once", n)
	}
}

// Two that are changed by many at once agree in the end.
func TestController_ManyChanges(t *testing.T) {
	srv := redistest.Start(t)
	a, b := newInstance(t, srv.Addr, t.TempDir(), "s"), newInstance(t, srv.Addr, t.TempDir(), "s")
	done := make(chan struct{})
	for n, i := range []*instance{a, b} {
		go func() {
			defer func() { done <- struct{}{} }()
			for k := range 20 {
				i.set(t, fmt.Sprintf("p%d-%d", n, k), control.Dark, time.Hour)
			}
		}()
	}
	<-done
	<-done
	all := func(i *instance) int {
		if f := i.inForce(); f != nil {
			return len(f.view.Switches)
		}
		return 0
	}
	until(t, "all 40 on both", func() bool { return all(a) == 40 && all(b) == 40 })
}

func TestController_Secrets(t *testing.T) {
	srv := redistest.Start(t)
	a, b := newInstance(t, srv.Addr, t.TempDir(), "one"), newInstance(t, srv.Addr, t.TempDir(), "another")
	for _, i := range []*instance{a, b} {
		until(t, "a warning", func() bool { return i.logs.FilterMessageSnippet("different key_secrets").Len() > 0 })
	}
	for _, i := range []*instance{a, b} {
		i.another(t)
		i.another(t)
		if n := i.logs.FilterMessageSnippet("different key_secrets").Len(); n != 1 {
			t.Errorf("warned %d times, want once", n)
		}
	}
}

// A snapshot that cannot be read or written, and a state in Redis that is none,
// leave what is in force as it is.
func TestController_Broken(t *testing.T) {
	srv := redistest.Start(t)
	folder := t.TempDir()
	a := newInstance(t, srv.Addr, folder, "s")
	a.set(t, "api", control.Dark, time.Hour)
	key := a.storageKey()
	if err := srv.Client().HSet(t.Context(), "stripe_ratelimit:{control}", "id", "99 x", "state", "{").Err(); err != nil {
		t.Fatal(err)
	}
	until(t, "it is written back", func() bool {
		return srv.Client().HGet(context.Background(), "stripe_ratelimit:{control}", "id").Val() != "99 x"
	})
	if got := a.mode("api"); got != control.Dark {
		t.Errorf("got %s, want dark", got)
	}
	if err := srv.Client().Set(t.Context(), "stripe_ratelimit:{control}", "x", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if pending := a.set(t, "edge", control.Dark, time.Hour); pending == nil {
		t.Error("set in a Redis that refuses: want to be told")
	}
	if got := a.mode("edge"); got != control.Dark {
		t.Errorf("set in a Redis that refuses: got %s, want dark here", got)
	}
	a.close()

	storage := &certmagic.FileStorage{Path: folder}
	if err := storage.Store(t.Context(), key, []byte("{")); err != nil {
		t.Fatal(err)
	}
	if b := newInstance(t, srv.Addr, folder, "s"); b.inForce() != nil {
		t.Error("a broken snapshot: want nothing in force")
	}
	file := t.TempDir() + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := newInstance(t, "", file, "s")
	if pending := c.set(t, "api", control.Off, time.Hour); pending != nil {
		t.Errorf("set: %v", pending)
	}
	if c.mode("api") != control.Off || c.logs.FilterMessageSnippet("cannot be written").Len() == 0 {
		t.Errorf("a storage that fails: got %s and the log %v, want off and a warning", c.mode("api"), c.logs.All())
	}
}

// A controller that follows another takes over what it has.
func TestController_TakeOver(t *testing.T) {
	old, next, elsewhere := newInstance(t, "", t.TempDir(), "s"), newInstance(t, "", t.TempDir(), "s"), newInstance(t, "", t.TempDir(), "s")
	elsewhere.place = "elsewhere"
	old.set(t, "fleet-wide", control.Dark, time.Hour)
	s := control.Switch{Target: control.Target{Pool: "here"}, Mode: control.Off, Scope: control.Instance}
	if _, err := old.change(t.Context(), false, control.Change{Set: &s, TTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	next.takeOver(old.controller)
	elsewhere.takeOver(old.controller)
	got := []control.Mode{next.mode("here"), next.mode("fleet-wide"), elsewhere.mode("here"), elsewhere.mode("fleet-wide")}
	want := []control.Mode{control.Off, control.Dark, control.Off, control.Enforce}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// another waits until the instance has heard of the store once more.
func (i *instance) another(t *testing.T) {
	t.Helper()
	i.mu.Lock()
	over := i.rounds
	i.mu.Unlock()
	select {
	case <-over:
	case <-time.After(soon):
		t.Fatalf("no round within %v", soon)
	}
}
