// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"time"
)

const (
	conns   = 64 // of HTTP/1.1, each with one request at a time
	conns2  = 4  // of HTTP/2
	streams = 16 // on each of those
)

// A driver is a number of clients that are connected to a site and have had a
// response each. run lets them work for a while, close disconnects them.
type driver struct {
	scenario scenario
	clients1 []*conn1
	clients2 []*conn2
	seed     uint64
}

// connect returns a driver. The same seed draws the same users.
func connect(s scenario, addr string, seed uint64) (_ *driver, err error) {
	d := &driver{scenario: s, seed: seed}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	if s.Protocol == "h2" {
		for range conns2 {
			c, err := dial2(addr)
			if err != nil {
				return nil, err
			}
			d.clients2 = append(d.clients2, c)
			if _, err := c.closedLoop(context.Background(), newPicker(s.Keys, seed), time.Now()); err != nil {
				return nil, err
			}
		}
		return d, nil
	}
	for range conns {
		c, err := dial1(addr)
		if err != nil {
			return nil, err
		}
		d.clients1 = append(d.clients1, c)
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := c.roundTrip(0); err != nil {
			return nil, err
		}
	}
	return d, nil
}

func (d *driver) close() {
	for _, c := range d.clients1 {
		_ = c.Close()
	}
	for _, c := range d.clients2 {
		_ = c.Close()
	}
}

// run lets the clients work until the context ends or the time has passed.
func (d *driver) run(ctx context.Context, length time.Duration) (*tally, error) {
	end := time.Now().Add(length)
	if d.scenario.Rate > 0 {
		return d.openLoop(ctx, end)
	}
	type result struct {
		*tally
		error
	}
	results := make(chan result)
	for i, c := range d.clients1 {
		go func() {
			t, err := c.closedLoop(ctx, newPicker(d.scenario.Keys, d.seed+uint64(i)), end)
			results <- result{t, err}
		}()
	}
	for i, c := range d.clients2 {
		go func() {
			t, err := c.closedLoop(ctx, newPicker(d.scenario.Keys, d.seed+uint64(i)), end)
			results <- result{t, err}
		}()
	}
	all := newTally()
	var errs error
	for range len(d.clients1) + len(d.clients2) {
		r := <-results
		if r.error != nil {
			errs = errors.Join(errs, r.error)
			continue
		}
		all.merge(r.tally)
	}
	return all, errs
}

// closedLoop sends a request as soon as the last one is answered.
func (c *conn1) closedLoop(ctx context.Context, pick func() int, end time.Time) (*tally, error) {
	_ = c.SetDeadline(end.Add(patience))
	t := newTally()
	for now := time.Now(); now.Before(end) && ctx.Err() == nil; {
		status, err := c.roundTrip(pick())
		if err != nil {
			return nil, err
		}
		sent := now
		now = time.Now()
		t.add(status, now.Sub(sent))
		t.last = now
	}
	return t, nil
}

// closedLoop keeps all streams busy, and sends at least one request on each.
func (c *conn2) closedLoop(ctx context.Context, pick func() int, end time.Time) (*tally, error) {
	_ = c.SetDeadline(end.Add(patience))
	t := newTally()
	for range streams {
		if err := c.send(pick()); err != nil {
			return nil, err
		}
	}
	for len(c.streams) > 0 {
		s, err := c.receive()
		if err != nil {
			return nil, err
		}
		if s == nil {
			continue
		}
		t.last = time.Now()
		t.add(s.status, t.last.Sub(s.sent))
		if t.last.Before(end) && ctx.Err() == nil {
			if err := c.send(pick()); err != nil {
				return nil, err
			}
		}
	}
	return t, nil
}

// openLoop sends requests when they are due, at random (as a Poisson process
// has it), however long others take. The latency counts from when a request was
// due: one that waits for a connection, or for this process, has waited.
func (d *driver) openLoop(ctx context.Context, end time.Time) (*tally, error) {
	type request struct {
		due  time.Time
		user int
	}
	type client struct {
		*conn1
		begun chan request
	}
	idle := make(chan *client, len(d.clients1))
	results := make(chan *tally)
	errs := make(chan error, len(d.clients1))
	for _, c := range d.clients1 {
		_ = c.SetDeadline(end.Add(patience))
		cl := &client{c, make(chan request, 1)}
		idle <- cl
		go func() {
			t := newTally()
			for r := range cl.begun {
				status, err := cl.readResponse()
				if err != nil {
					errs <- err
					break // and be idle never again
				}
				t.last = time.Now()
				t.add(status, t.last.Sub(r.due))
				idle <- cl
			}
			results <- t
		}()
	}

	// This goroutine writes the requests itself, so that each is on its way when
	// the thread has woken up.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	all := newTally()
	pick := newPicker(d.scenario.Keys, d.seed)
	gaps := rand.New(rand.NewPCG(d.seed, 2))
	stuck := time.After(time.Until(end) + patience)
	var err error
	for due := time.Now(); due.Before(end) && ctx.Err() == nil && err == nil; {
		due = due.Add(time.Duration(gaps.ExpFloat64() / d.scenario.Rate * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			sleep(wait)
		}
		select {
		case c := <-idle:
			r := request{due, pick()}
			all.late = append(all.late, time.Since(due))
			if _, err = c.Write(requests1[r.user]); err == nil {
				c.begun <- r
			}
		case err = <-errs:
		case <-stuck:
			err = errors.New("no connection becomes idle")
		}
	}
	// Whatever is under way comes back, and the connections are as before.
	for range d.clients1 {
		select {
		case c := <-idle:
			close(c.begun)
			all.merge(<-results)
		case e := <-errs:
			err = errors.Join(err, e)
			all.merge(<-results)
		}
	}
	return all, err
}
