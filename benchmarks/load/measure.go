// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/benchmarks/redisproc"
)

// point is what one round of a scenario measures. CPU is in us, of all
// processors, for each request; allocations are for each request, too.
type point struct {
	Requests   int     `json:"requests"`
	Rate       float64 `json:"rate"` // requests a second
	Caddy      float64 `json:"caddy"`
	Redis      float64 `json:"redis"`
	Script     float64 `json:"script"` // us that Redis spends within scripts
	Upstream   float64 `json:"upstream"`
	Load       float64 `json:"load"` // of this program, the clients
	P50        float64 `json:"p50"`  // ms
	P90        float64 `json:"p90"`
	P99        float64 `json:"p99"`
	P999       float64 `json:"p99_9"`
	Late       float64 `json:"late_p99"` // ms that requests were sent after they were due
	Allocs     float64 `json:"allocs"`   // of Caddy
	Bytes      float64 `json:"bytes"`
	FailedOpen float64 `json:"failed_open"` // share of requests
	Denied     float64 `json:"denied"`      // share of requests
	Other      float64 `json:"other"`       // share of requests with neither 200 nor 429

	Commands map[string]float64 `json:"commands,omitempty"` // those within scripts, too
}

// tolerated is the share of odd responses above which something is broken. Of
// fewer, which a machine that stalls is enough for, the report tells.
const tolerated = 0.5

// cpu is what a request costs to serve and to limit.
func (p point) cpu() float64 { return p.Caddy + p.Redis }

// lab is where everything runs.
type lab struct {
	upstream *upstream
	servers  map[string]*server
	dir      string
	seed     uint64
}

// open starts what the scenarios need.
func open(ctx context.Context, all []scenario) (_ *lab, err error) {
	l := &lab{servers: map[string]*server{}}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	if l.dir, err = os.MkdirTemp("", "load-"); err != nil {
		return nil, err
	}
	if l.upstream, err = startUpstream(); err != nil {
		return nil, err
	}
	denial := filepath.Join(l.dir, "denial.json")
	for _, s := range setups { // flood-bare needs flood, before it
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !slices.ContainsFunc(all, func(c scenario) bool { return c.Setup == s.name || c.reference().Setup == s.name }) &&
			!(s.name == "flood" && slices.ContainsFunc(all, func(c scenario) bool { return c.Setup == bareFlood })) {
			continue
		}
		srv, err := startServer(s, l.dir, l.upstream.addr, denial)
		if err != nil {
			return nil, err
		}
		l.servers[s.name] = srv
		if s.name == "flood" {
			if err := saveDenial(ctx, srv.sites["respond"], denial); err != nil {
				return nil, err
			}
		}
	}
	return l, nil
}

func (l *lab) close() {
	for _, s := range l.servers {
		s.stop()
	}
	if l.upstream != nil {
		l.upstream.stop()
	}
	if l.dir != "" {
		_ = os.RemoveAll(l.dir)
	}
}

// counters is what all the processes have used so far.
type counters struct {
	caddy, upstream usage
	load            float64
	store           redisproc.Usage
	failedOpen      float64
}

func (l *lab) read(ctx context.Context, srv *server) (c counters, err error) {
	if c.failedOpen, err = srv.failedOpen(); err != nil {
		return c, err
	}
	if c.upstream, err = l.upstream.usage(); err != nil {
		return c, err
	}
	if srv.redis != nil {
		if c.store, err = redisproc.ReadUsage(ctx, srv.redis); err != nil {
			return c, err
		}
	}
	if c.caddy, err = srv.usage(); err != nil {
		return c, err
	}
	c.load = ownCPU()
	return c, nil
}

// measure puts load on a scenario for some time.
func (l *lab) measure(ctx context.Context, s scenario, length time.Duration) (p point, err error) {
	srv := l.servers[s.Setup]
	l.seed += 1000
	d, err := connect(s, srv.sites[s.Answer], l.seed)
	if err != nil {
		return p, err
	}
	defer d.close()

	before, err := l.read(ctx, srv)
	if err != nil {
		return p, err
	}
	began := time.Now()
	t, err := d.run(ctx, length)
	if err != nil {
		return p, err
	}
	if err := ctx.Err(); err != nil {
		return p, err
	}
	loadCPU := ownCPU() // what follows is not load
	after, err := l.read(ctx, srv)
	if err != nil {
		return p, err
	}
	n := float64(len(t.latencies))
	if n == 0 {
		return p, fmt.Errorf("no request within %v", length)
	}
	p = point{
		Requests:   len(t.latencies),
		Rate:       n / t.last.Sub(began).Seconds(),
		Caddy:      (after.caddy.CPU - before.caddy.CPU) / n,
		Redis:      (after.store.CPU - before.store.CPU) / n,
		Script:     (after.store.Script - before.store.Script) / n,
		Upstream:   (after.upstream.CPU - before.upstream.CPU) / n,
		Load:       (loadCPU - before.load) / n,
		Allocs:     (after.caddy.Allocs - before.caddy.Allocs) / n,
		Bytes:      (after.caddy.Bytes - before.caddy.Bytes) / n,
		FailedOpen: (after.failedOpen - before.failedOpen) / n,
		Denied:     float64(t.statuses[429]) / n,
		Other:      1 - float64(t.statuses[200]+t.statuses[429])/n,
	}
	if p.Other > tolerated {
		return p, fmt.Errorf("odd responses: %v", t.statuses)
	}
	ms := milliseconds(t.latencies)
	p.P50, p.P90, p.P99, p.P999 = quantile(ms, 0.5), quantile(ms, 0.9), quantile(ms, 0.99), quantile(ms, 0.999)
	if late := milliseconds(t.late); len(late) > 0 {
		p.Late = quantile(late, 0.99)
	}
	if srv.redis != nil {
		p.Commands = map[string]float64{}
		for command, calls := range after.store.Calls {
			if calls -= before.store.Calls[command]; calls > 0 {
				p.Commands[command] = calls / n
			}
		}
	}
	return p, nil
}

// commands returns how many commands Redis is sent for each request.
func (l *lab) commands(ctx context.Context, s scenario, length time.Duration) (map[string]float64, error) {
	srv := l.servers[s.Setup]
	d, err := connect(s, srv.sites[s.Answer], l.seed)
	if err != nil {
		return nil, err
	}
	defer d.close()
	n := 0
	sent, err := sentCommands(srv.redisAddr, func() error {
		t, err := d.run(ctx, length)
		if err == nil {
			n = len(t.latencies)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for command := range sent {
		sent[command] /= float64(n)
	}
	return sent, nil
}

// series is all that was measured of a scenario.
type series struct {
	scenario
	Sent   map[string]float64 `json:"sent,omitempty"` // commands that clients send Redis, for each request
	Rounds []point            `json:"rounds"`
}

// measureAll measures every scenario once a round, so that what else happens on
// the machine meets all of them alike.
func (l *lab) measureAll(ctx context.Context, log io.Writer, all []scenario, rounds int, length time.Duration) ([]*series, error) {
	results := make([]*series, 0, len(all))
	for _, s := range all {
		fmt.Fprintf(log, "\rwarm up: %-40s", s)
		if _, err := l.measure(ctx, s, length/2); err != nil {
			return nil, fmt.Errorf("%s: %w", s, err)
		}
		r := &series{scenario: s}
		if l.servers[s.Setup].redis != nil {
			var err error
			if r.Sent, err = l.commands(ctx, s, min(length, 200*time.Millisecond)); err != nil {
				return nil, fmt.Errorf("%s: %w", s, err)
			}
		}
		results = append(results, r)
	}
	for round := range rounds {
		for _, r := range results {
			fmt.Fprintf(log, "\rround %d of %d: %-40s", round+1, rounds, r)
			p, err := l.measure(ctx, r.scenario, length)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r, err)
			}
			r.Rounds = append(r.Rounds, p)
		}
	}
	fmt.Fprintf(log, "\r%-60s\r", "")
	return results, nil
}

// milliseconds sorts durations.
func milliseconds(d []time.Duration) []float64 {
	ms := make([]float64, len(d))
	for i := range d {
		ms[i] = float64(d[i]) / float64(time.Millisecond)
	}
	slices.Sort(ms)
	return ms
}

// quantile returns the smallest of the sorted values that at least the share q
// of them does not exceed.
func quantile(sorted []float64, q float64) float64 {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
