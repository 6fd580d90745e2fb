// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// ground is a Redis under which it shakes.
type ground struct {
	t     *testing.T
	redis *redistest.FakeServer

	offset time.Duration // of its clock
	behind int64         // µs that it was set back, in sum

	mu sync.Mutex // guards below
	h  History
}

// newGround starts a Redis, which writes to its file before it answers: so it can
// be killed and lose nothing.
func newGround(t *testing.T) *ground {
	g := &ground{t: t, redis: redistest.StartFakeTime(t, "--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0")}
	g.redis.SetOffset(0)
	start, wall := time.Now(), now()
	t.Cleanup(func() {
		if off := now() - wall - time.Since(start).Microseconds(); off < -second/20 || off > second/20 {
			t.Logf("this machine's clock was set by %d µs meanwhile, so complaints may be false", off)
		}
	})
	return g
}

// now is the time in µs, of the clock that Redis has, too.
func now() int64 { return time.Now().UnixMicro() }

// upTo returns a time below a limit.
func upTo(rng *rand.Rand, limit time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(limit)))
}

// command sends a command on a connection of its own.
func (g *ground) command(args ...any) any {
	g.t.Helper()
	rdb := g.redis.Client()
	defer rdb.Close()
	reply, err := rdb.Do(g.t.Context(), args...).Result()
	if err != nil {
		g.t.Fatalf("%v: %v", args[0], err)
	}
	return reply
}

// restart starts Redis anew, and waits until it has read its file.
func (g *ground) restart() {
	g.redis.Restart()
	rdb := g.redis.Client()
	defer rdb.Close()
	eventually(g.t, "loaded", func() bool { return rdb.DBSize(g.t.Context()).Err() == nil })
}

// lost notes that what Redis had is gone since some moment from a time until now.
func (g *ground) lost(from int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.h.Losses = append(g.h.Losses, Span{from, now()})
}

// jump sets Redis's clock.
func (g *ground) jump(by time.Duration) {
	from := now()
	g.offset += by
	g.redis.SetOffset(g.offset)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.h.Jumps = append(g.h.Jumps, Jump{Span{from, now()}, by.Microseconds()})
	g.behind += max(0, -by.Microseconds())
}

// fault is one way to fail. It lasts for d or so, and is over when do returns.
type fault struct {
	name string
	do   func(rng *rand.Rand, d time.Duration)
}

// faults are those of Redis itself.
func (g *ground) faults() []fault {
	return []fault{
		{"Redis hangs", func(_ *rand.Rand, d time.Duration) {
			g.redis.Stop()
			time.Sleep(d)
			g.redis.Cont()
		}},
		{"Redis is killed and comes back with its data", func(_ *rand.Rand, d time.Duration) {
			g.redis.Kill()
			time.Sleep(d)
			g.restart()
		}},
		{"Redis is killed and comes back without its data", func(_ *rand.Rand, d time.Duration) {
			from := now()
			g.redis.Kill()
			g.lost(from)
			dir := g.redis.Args[1+slices.Index(g.redis.Args, "--dir")]
			if err := os.RemoveAll(filepath.Join(dir, "appendonlydir")); err != nil {
				g.t.Fatal(err)
			}
			time.Sleep(d)
			g.restart()
		}},
		{"FLUSHALL", func(*rand.Rand, time.Duration) {
			from := now()
			g.command("FLUSHALL")
			g.lost(from)
		}},
		{"SCRIPT FLUSH", func(*rand.Rand, time.Duration) { g.command("SCRIPT", "FLUSH") }},
		{"CLIENT KILL", func(*rand.Rand, time.Duration) { g.command("CLIENT", "KILL", "TYPE", "normal") }},
		{"Redis's clock jumps forward", func(rng *rand.Rand, _ time.Duration) {
			g.jump(time.Duration(1+rng.IntN(12)) * 250 * time.Millisecond)
		}},
		{"Redis's clock jumps back", func(rng *rand.Rand, _ time.Duration) {
			g.jump(-time.Duration(1+rng.IntN(4)) * 250 * time.Millisecond)
		}},
	}
}

// play makes faults follow each other for a time, each once before any comes
// again, with a gap of up to twice the mean, and returns how many there were.
func (g *ground) play(rng *rand.Rand, faults []fault, length, gap time.Duration) (n int) {
	var deck []int
	for end := time.Now().Add(length); ; n++ {
		time.Sleep(min(time.Until(end), upTo(rng, 2*gap)))
		if !time.Now().Before(end) {
			return n
		}
		if len(deck) == 0 {
			deck = rng.Perm(len(faults))
		}
		f := faults[deck[0]]
		deck = deck[1:]
		from := now()
		f.do(rng, 100*time.Millisecond+upTo(rng, 500*time.Millisecond))
		to := now()
		g.mu.Lock()
		g.h.Troubles = append(g.h.Troubles, Span{from, to})
		g.mu.Unlock()
		g.t.Logf("%d µs: %s, %v", from, f.name, time.Duration(to-from)*time.Microsecond)
	}
}
