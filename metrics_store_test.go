// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// Whatever happens, there is a line a second at most; failures beyond that are
// counted, and what becomes of nodes is said a little later, in order.
func TestStoreLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		l := storeLog{logger: func() *zap.Logger { return zap.New(core) }}
		start := time.Now()
		fail := func(n int) {
			for range n {
				l.failed(time.Now(), "admit", io.EOF)
			}
		}
		change := func(node string, open bool) {
			l.changed(time.Now(), nodeChange{node, open, fmt.Errorf("admit: %w", io.EOF)})
		}
		fail(5)
		change("a", true)
		change("b", true)
		time.Sleep(500 * time.Millisecond)
		change("a", false)
		time.Sleep(10 * time.Second)
		change("c", true)
		fail(3)
		time.Sleep(2 * time.Second)
		fail(1)
		change("d", true) // after the end nobody is told
		l.close()
		time.Sleep(time.Minute)

		var got []string
		for _, e := range logs.All() {
			fields := e.ContextMap()
			got = append(got, fmt.Sprintf("%v %v %s %v %v", e.Time.Sub(start), e.Level, strings.Join(strings.Fields(e.Message)[:3], " "), fields["node"], fields["failures_not_logged"]))
		}
		want := []string{
			"0s warn store failed; on_store_error <nil> 0",
			"1s warn Redis node fails; a 4",
			"2s warn Redis node fails; b 0",
			"3s info Redis node works a 0",
			"10.5s warn Redis node fails; c 0",
			"12.5s warn store failed; on_store_error <nil> 3",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("log, -want +got:\n%s", diff)
		}
	})
}

// What waits to be logged does not grow without end.
func TestStoreLog_IsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		l := storeLog{logger: func() *zap.Logger { return zap.New(core) }}
		for i := range 10_000 {
			l.changed(time.Now(), nodeChange{fmt.Sprint(i), true, io.EOF})
		}
		time.Sleep(time.Hour)
		all := logs.All()
		if last := all[len(all)-1].ContextMap()["node"]; len(all) != 1+maxChanges || last != "9999" {
			t.Errorf("got %d lines, the last about %v, want %d, the last about 9999", len(all), last, 1+maxChanges)
		}
	})
}

// A call that was not made is a failure, and no duration.
func TestStoreObserver_BreakerOpen(t *testing.T) {
	storeErrorsTotal.Reset()
	storeDuration.Reset()
	reg := newTestRegistry(t)
	r := limiters.NewRedis(limiters.RedisOptions{
		Universal: redis.UniversalOptions{Addrs: []string{"127.0.0.1:1"}},
		Timeout:   20 * time.Second, // which nobody reaches: the connection is refused
		Observe:   newStoreObserver(),
	})
	s := &store{Store: r, events: newEvents()}
	nodes := map[string]bool{"elsewhere": true}
	if s.nodes(nodes); nodes["127.0.0.1:1"] || len(nodes) != 2 {
		t.Errorf("got the nodes %v, want two, one of them open", nodes)
	}
	limit, err := limiters.NewRate("pool", "rate", 1, time.Hour, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	calls := 0.0
	call := func() {
		calls++
		_, err := r.Admit(t.Context(), []limiters.Ask{{Identity: limiters.Identity{1}, Checks: []limiters.Check{{Limit: limit}}}})
		if err == nil {
			t.Fatal("no error without a server")
		}
	}
	eventually(t, func() bool {
		call()
		s.nodes(nodes)
		return nodes["127.0.0.1:1"]
	})
	for range 10 {
		call()
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	failed := series(t, reg, "store_errors_total", "")
	made := calls - failed["operation=admit reason=breaker_open"]
	if made != failed["operation=admit reason=connection"] || made < 5 {
		t.Errorf("got %v, want connections refused, then breaker_open, %v in all", failed, calls)
	}
	var sample dto.Metric
	if err := storeDuration.WithLabelValues("admit").(prometheus.Metric).Write(&sample); err != nil {
		t.Fatal(err)
	}
	if got := sample.GetHistogram().GetSampleCount(); got != uint64(made) {
		t.Errorf("%d durations, want %v", got, made)
	}
}

func TestMetrics_Breaker(t *testing.T) {
	reg := newTestRegistry(t)
	setGauges(t, gaugeSnapshot{nodes: map[string]bool{"10.0.0.1:6379": true, "10.0.0.2:6379": false}})
	got := series(t, reg, "store_breaker_open", "")
	if diff := cmp.Diff(map[string]float64{"node=10.0.0.1:6379": 1, "node=10.0.0.2:6379": 0}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
