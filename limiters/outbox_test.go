// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// incr returns a command that can be counted.
func incr(ctx context.Context, key string) []*command {
	return []*command{{Cmder: &scriptCmd{IntSliceCmd: redis.NewIntSliceCmd(ctx, "eval", "return {redis.call('INCR', KEYS[1])}", 1, key)}}}
}

func within30s(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// waitingIs waits until so many parcels wait.
func waitingIs(t *testing.T, o *outbox, n int) {
	t.Helper()
	eventually(t, "a full outbox", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.waiting) == n
	})
}

// What comes while a node is busy leaves together, and what was left behind
// never does. Each command has its own answer.
func TestOutbox(t *testing.T) {
	srv := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: srv.Addr, ReadTimeout: patience, Protocol: 2})
	t.Cleanup(func() { _ = client.Close() })
	if err := client.Set(t.Context(), "broken", "text", 0).Err(); err != nil {
		t.Fatal(err)
	}
	o := &outbox{lag: time.Hour} // nobody overtakes
	srv.Stop()

	var wg sync.WaitGroup
	first := incr(within30s(t), "first")
	wg.Go(func() { o.send(within30s(t), client, first) })
	eventually(t, "a pipeline under way", func() bool { o.mu.Lock(); defer o.mu.Unlock(); return o.away == 1 })

	ctx, cancel := context.WithCancel(within30s(t))
	gone := incr(ctx, "gone")
	left := make(chan time.Time, 1)
	go func() {
		sent, _ := o.send(ctx, client, gone)
		left <- sent
	}()
	waitingIs(t, o, 1)
	const many = 50
	results := make([][]*command, many)
	for i := range results {
		key := "many"
		if i%10 == 3 {
			key = "broken"
		}
		results[i] = incr(ctx, key)
		wg.Go(func() { o.send(within30s(t), client, results[i]) })
	}
	waitingIs(t, o, 1+many)
	cancel()
	if sent := <-left; !sent.IsZero() || !errors.Is(gone[0].Err(), context.Canceled) {
		t.Errorf("the caller that left: sent at %v, %v", sent, gone[0].Err())
	}

	srv.Cont()
	wg.Wait()
	if err := first[0].Err(); err != nil {
		t.Error(err)
	}
	for i, c := range results {
		if err := c[0].Err(); (err != nil) != (i%10 == 3) {
			t.Errorf("command %d: got %v", i, err)
		}
	}
	if n := client.Get(t.Context(), "many").Val(); n != "45" {
		t.Errorf("got %s calls, want 45", n)
	}
	if n := client.Exists(t.Context(), "gone").Val(); n != 0 {
		t.Error("what was left behind was sent")
	}
}

// A pipeline that hangs for longer than the last one took lets others pass.
func TestOutbox_HangingPipeline(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	client := redis.NewClient(&redis.Options{Addr: proxy.Addr, ContextTimeoutEnabled: true, MaxRetries: -1, Protocol: 2})
	t.Cleanup(func() { _ = client.Close() })
	var o outbox
	o.send(within30s(t), client, incr(t.Context(), "n"))
	proxy.Strand() // the connection leads nowhere, others are good
	ctx, cancel := context.WithCancel(within30s(t))
	done := make(chan struct{})
	go func() {
		o.send(ctx, client, incr(ctx, "n"))
		close(done)
	}()
	eventually(t, "a pipeline under way", func() bool { o.mu.Lock(); defer o.mu.Unlock(); return o.away == 1 })
	o.mu.Lock()
	o.left = o.left.Add(-maxLag) // time passes
	o.mu.Unlock()
	c := incr(t.Context(), "n")
	if o.send(within30s(t), client, c); c[0].Err() != nil {
		t.Error(c[0].Err())
	}
	cancel()
	proxy.CloseAll()
	<-done
}

// Of a pipeline whose connection breaks, what was answered stays answered.
func TestScriptCmd_KeepsItsAnswer(t *testing.T) {
	c := &scriptCmd{IntSliceCmd: redis.NewIntSliceCmd(t.Context())}
	c.SetErr(errShape)
	if c.Err() == nil {
		t.Error("an error is lost")
	}
	c.SetErr(nil)
	c.SetErr(errShape)
	if err := c.Err(); err != nil {
		t.Errorf("got %v after an answer", err)
	}
}
