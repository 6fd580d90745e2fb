// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// incr returns a command that can be counted.
func incr(t *testing.T, key string) []*command {
	return []*command{{Cmder: &scriptCmd{IntSliceCmd: redis.NewIntSliceCmd(t.Context(), "eval", "return {redis.call('INCR', KEYS[1])}", 1, key)}}}
}

func newOutbox() *outbox { return &outbox{clock: &serverClock{base: time.Now()}} }

func in30s() time.Time { return time.Now().Add(patience) }

// waitingIs waits until so many parcels wait.
func waitingIs(t *testing.T, o *outbox, n int) {
	t.Helper()
	eventually(t, "a full outbox", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.waiting) == n
	})
}

// awayIs waits until so many pipelines are under way.
func awayIs(t *testing.T, o *outbox, n int) {
	t.Helper()
	eventually(t, "a pipeline under way", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.away) == n
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
	o := newOutbox()
	o.lag = time.Hour // nobody overtakes
	srv.Stop()

	var wg sync.WaitGroup
	first := incr(t, "first")
	wg.Go(func() { o.send(client, in30s(), nil, first) })
	awayIs(t, o, 1)

	gone := incr(t, "gone")
	goneBy := time.Now().Add(time.Second)
	left := make(chan time.Time, 1)
	go func() {
		sent, _ := o.send(client, goneBy, nil, gone)
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
		results[i] = incr(t, key)
		wg.Go(func() { o.send(client, in30s(), nil, results[i]) })
	}
	waitingIs(t, o, 1+many)
	if sent := <-left; !sent.IsZero() || !errors.Is(gone[0].Err(), context.DeadlineExceeded) || time.Now().Before(goneBy) {
		t.Errorf("the caller that left: sent at %v, %v, %v too early", sent, gone[0].Err(), time.Until(goneBy))
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

// Callers leave at their own deadlines, in whatever order these come, before they
// were sent and after; others get their answers.
func TestOutbox_Deadlines(t *testing.T) {
	srv := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: srv.Addr, ReadTimeout: patience, Protocol: 2})
	t.Cleanup(func() { _ = client.Close() })
	o := newOutbox()
	o.lag = time.Hour
	srv.Stop()
	var wg sync.WaitGroup
	first := incr(t, "n")
	wg.Go(func() { o.send(client, in30s(), nil, first) })
	awayIs(t, o, 1)

	commands := make([][]*command, 20)
	for i := range commands {
		commands[i] = incr(t, "n")
		deadline := in30s()
		if i%2 == 0 { // the later, the earlier
			deadline = time.Now().Add(time.Duration(300-10*i) * time.Millisecond)
		}
		wg.Go(func() {
			_, received := o.send(client, deadline, nil, commands[i])
			if i%2 == 0 && received.Before(deadline) {
				t.Errorf("caller %d left %v before its time", i, deadline.Sub(received))
			}
		})
	}
	eventually(t, "half to be gone", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		gone := 0
		for _, p := range o.waiting {
			if p.gone {
				gone++
			}
		}
		return gone == len(commands)/2
	})
	srv.Cont()
	wg.Wait()
	for i, c := range commands {
		if err := c[0].Err(); errors.Is(err, context.DeadlineExceeded) != (i%2 == 0) {
			t.Errorf("caller %d: got %v", i, err)
		}
	}
	if n := client.Get(t.Context(), "n").Val(); n != "11" {
		t.Errorf("got %s calls, want 11", n)
	}
}

// Who waits behind more callers that have left than a pipeline has room for leaves
// with the next one all the same, though nobody else comes.
func TestOutbox_BehindManyThatAreGone(t *testing.T) {
	srv := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: srv.Addr, ReadTimeout: patience, Protocol: 2})
	t.Cleanup(func() { _ = client.Close() })
	o := newOutbox()
	o.lag = time.Hour
	srv.Stop()
	var here, gone sync.WaitGroup
	here.Go(func() { o.send(client, in30s(), nil, incr(t, "n")) })
	awayIs(t, o, 1)
	for range maxPipeline + 1 {
		gone.Go(func() { o.send(client, time.Now(), nil, incr(t, "n")) })
	}
	gone.Wait()
	last := incr(t, "n")
	here.Go(func() { o.send(client, in30s(), nil, last) })
	waitingIs(t, o, maxPipeline+2)
	srv.Cont()
	here.Wait()
	if err := last[0].Err(); err != nil {
		t.Error(err)
	}
}

// A pipeline that hangs for longer than the last one took lets others pass.
func TestOutbox_HangingPipeline(t *testing.T) {
	srv := redistest.Start(t)
	proxy := redistest.StartProxy(t, srv.Addr)
	client := redis.NewClient(&redis.Options{
		Addr: proxy.Addr, ContextTimeoutEnabled: true, ReadTimeout: patience, DialTimeout: patience, MaxRetries: -1, Protocol: 2,
	})
	t.Cleanup(func() { _ = client.Close() })
	o := newOutbox()
	o.send(client, in30s(), nil, incr(t, "n"))
	proxy.Strand() // the connection leads nowhere, others are good
	done := make(chan struct{})
	go func() {
		o.send(client, in30s(), nil, incr(t, "n"))
		close(done)
	}()
	awayIs(t, o, 1)
	eventually(t, "the connection in use", func() bool { return client.PoolStats().IdleConns == 0 })
	o.mu.Lock()
	o.away[0].sent = o.away[0].sent.Add(-2 * time.Hour) // time passes
	o.mu.Unlock()
	for range 2 { // the next one, too, with nobody after it
		o.mu.Lock()
		o.lag = time.Hour
		o.mu.Unlock()
		c := incr(t, "n")
		if o.send(client, in30s(), nil, c); c[0].Err() != nil {
			t.Error(c[0].Err())
		}
	}
	proxy.CloseAll()
	<-done
}

// Calls that ask the same are one command, others are others.
func TestOutbox_Together(t *testing.T) {
	srv := redistest.Start(t)
	r := handRedis(t, redisAt(srv.Addr))
	bucket, other, two := rate(t, "rate", 1, time.Hour, 5, 1), rate(t, "rate", 2, time.Hour, 5, 1), concurrency(t, "two", 2, 10*time.Second)
	r.ask(in30s(), r.calls(time.Now(), []Check{{Limit: bucket}}, id("z"))) // it knows the script and the clock from now on
	rdb := srv.Client()
	rdb.ConfigResetStat(t.Context())
	same := []Check{{Limit: bucket}, {Limit: two}}
	calls := r.calls(time.Now(), same, id("a"), id("b"), id("c"))
	calls = append(calls, r.calls(time.Now(), []Check{{Limit: bucket, Dark: true}, {Limit: two}}, id("d"))...)
	calls = append(calls, r.calls(time.Now(), []Check{{Limit: other}, {Limit: two}}, id("e"))...)
	calls = append(calls, r.calls(time.Now(), slices.Clone(same), id("f"))...)
	r.ask(in30s(), calls)
	for i, c := range calls {
		if c.err != nil || c.answer[0] != replyAllowed || c.answer[3] != 1 {
			t.Errorf("call %d: got %v, %v", i, c.answer, c.err)
		}
	}
	if stats := rdb.Info(t.Context(), "commandstats").Val(); !strings.Contains(stats, "cmdstat_evalsha:calls=3,") {
		t.Errorf("want 3 commands: of four calls, of a dark one and of one with other numbers; got\n%s", stats)
	}
}

// A server of a Cluster which has all slots works like any other, though it wants
// the keys of one slot in a command.
func TestOutbox_Apart(t *testing.T) {
	srv := redistest.StartCluster(t, 1, 0).Masters[0]
	r := handRedis(t, redisAt(srv.Addr))
	checks := []Check{{Limit: rate(t, "rate", 1, time.Hour, 5, 1)}, {Limit: concurrency(t, "two", 2, 10*time.Second)}}
	for want := int64(1); want <= 2; want++ {
		calls := r.calls(time.Now(), checks, id("a"), id("b"), id("c"))
		r.ask(in30s(), calls)
		for i, c := range calls {
			if c.err != nil || c.answer[0] != replyAllowed || c.answer[3] != want {
				t.Errorf("call %d: got %v, %v, want %d leases", i, c.answer, c.err, want)
			}
		}
	}
}

// A call is one allocation, and another of a hundred in one command is none.
func TestAdmitCall_Allocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	r := handRedis(t, redisAt("127.0.0.1:1"))
	checks := []Check{{Limit: rate(t, "rate", 1, time.Hour, 5, 1)}, {Limit: concurrency(t, "two", 2, 10*time.Second)}}
	now := time.Now()
	c := new(admitCall)
	if got := testing.AllocsPerRun(1000, func() { r.prepare(c, now, Ask{id("a"), checks}) }); got > 1 {
		t.Errorf("to prepare: got %v allocations, want 1", got)
	}
	commandOf := func(n int) float64 {
		a := &admitCommand{calls: make([]*admitCall, 0, n)}
		for range n {
			a.add(c)
		}
		room := a.compose(t.Context(), nil)
		return testing.AllocsPerRun(1000, func() { room = a.compose(t.Context(), room) })
	}
	if one, many := commandOf(1), commandOf(100); many > one {
		t.Errorf("to compose: got %v allocations for one call, %v for a hundred", one, many)
	}
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
