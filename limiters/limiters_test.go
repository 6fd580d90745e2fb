// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"math"
	"strings"
	"testing"
	"time"
)

func TestNewRate_Errors(t *testing.T) {
	cases := []struct {
		requests int64
		period   time.Duration
		capacity int64
		cost     int64
		want     string // part of the error; "" if there is none
	}{
		{1, time.Millisecond, 1, 1, ""},
		{1_000_000, time.Second, 1, 1, ""},
		{math.MaxInt64 / 2, time.Hour, 1, 1, "more than 1000000 a second"},
		{60_000_000, time.Minute, 1, 1, ""},
		{60_000_001, time.Minute, 1, 1, "more than 1000000 a second"},
		{1, time.Minute, maxExact / 60_000_000, 1, ""},
		{1, time.Minute, maxExact/60_000_000 + 1, 1, "burst 150119988 is too large for a period of 1m0s; at most 150119987"},
		{1, time.Minute + time.Millisecond, maxExact / 60_001, 1, ""},
		{1, time.Minute + time.Microsecond, 1, 1, "period 1m0.000001s is not a whole number of 1ms"},
		{1, 10 * 365 * 24 * time.Hour, 1, 1, ""},
		{0, time.Second, 1, 1, "0 requests; at least 1"},
		{-5, time.Second, 1, 1, "-5 requests; at least 1"},
		{1, 0, 1, 1, "period 0s is shorter than 1ms"},
		{1, 999 * time.Microsecond, 1, 1, "shorter than 1ms"},
		{1, 1500*time.Microsecond + 1, 1, 1, "not a whole number of 1µs"},
		{1, time.Second, 0, 1, "burst 0; at least 1"},
		{1, time.Second, 1, 0, "cost 0; at least 1"},
		{1, time.Second, 5, 6, "cost 6 exceeds burst 5"},
		{1, time.Second, math.MaxInt64, 1, "too large"},
	}
	for _, c := range cases {
		l, err := NewRate("pool", "rate", c.requests, c.period, c.capacity, c.cost)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%d/%v burst %d cost %d: %v", c.requests, c.period, c.capacity, c.cost, err)
		case c.want == "" && (l.capacityUnits() > maxExact || l.capacityUnits()/l.periodTicks != c.capacity):
			t.Errorf("%d/%v burst %d: %d units", c.requests, c.period, c.capacity, l.capacityUnits())
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%d/%v burst %d cost %d: got %v, want %q", c.requests, c.period, c.capacity, c.cost, err, c.want)
		}
	}
}

func TestNewConcurrency_Errors(t *testing.T) {
	cases := []struct {
		capacity int64
		lease    time.Duration
		want     string
	}{
		{1, MinLease, ""},
		{maxExact, MaxLease, ""},
		{0, DefaultLease, "0; at least 1"},
		{maxExact + 1, DefaultLease, "too large"},
		{1, MinLease - time.Millisecond, "not between 1s and 1h0m0s"},
		{1, MaxLease + time.Millisecond, "not between 1s and 1h0m0s"},
		{1, MinLease + time.Microsecond, "not a whole number of milliseconds"},
	}
	for _, c := range cases {
		_, err := NewConcurrency("pool", "concurrency", c.capacity, c.lease)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%d for %v: got %v, want %q", c.capacity, c.lease, err, c.want)
		}
	}
}

// No request waits for ever, though it may be close.
func TestLimit_LongestWait(t *testing.T) {
	l := rate(t, "rate", 1, 365*24*time.Hour, 1000, 1000)
	if got, want := l.until(0, l.costUnits()), time.Duration(math.MaxInt64).Truncate(time.Millisecond); got != want {
		t.Errorf("wait: got %v, want %v", got, want)
	}
}

func TestRefill_DoesNotOverflow(t *testing.T) {
	l := rate(t, "rate", 1_000_000, time.Second, 5, 1)
	for _, elapsed := range []int64{5_000_000, math.MaxInt64 / 2, math.MaxInt64} {
		if got, want := l.refill(0, elapsed), l.capacityUnits(); got != want {
			t.Errorf("after %d ticks: got %d, want %d", elapsed, got, want)
		}
	}
	if got := l.refill(3, math.MinInt64); got != 3 {
		t.Errorf("on a clock set back: got %d, want 3", got)
	}
}

func TestWords(t *testing.T) {
	for got, want := range map[string]string{
		Rate.String(): "rate", Concurrency.String(): "concurrency", Kind(0).String(): "unknown",
		Unknown.String(): "store_error", Allowed.String(): "allowed", Denied.String(): "denied", NotEvaluated.String(): "not_evaluated",
		Identity{}.String(): "00000000000000000000000000000000", Identity{15: 0xab}.String(): "000000000000000000000000000000ab",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if !(Identity{}).IsZero() || (Identity{15: 1}).IsZero() {
		t.Error("IsZero is wrong")
	}
}

// The estimate stays between what the replies prove.
func TestServerClock(t *testing.T) {
	rows := []struct {
		name           string
		sent, received float64 // s
		told           float64
		want           float64 // s that the server is ahead
	}{
		{"the first reply", 1, 3, 102, 99},
		{"a faster one proves more", 4, 5, 105.5, 100.5},
		{"a slow one proves no less", 6, 9, 107, 100.5},
		{"as late as it can be", 10, 11, 110.5, 100.5},
		{"the clock was set back", 12, 13, 62, 49},
		{"and forward", 14, 15, 1000, 985},
	}
	c := &serverClock{base: epoch}
	for _, row := range rows {
		c.learn(sec(row.sent), sec(row.received), int64(row.told*1e6))
		if got, want := c.at(sec(100)), int64((100+row.want)*1e6); got != want {
			t.Errorf("%s: at 100 s: got %d, want %d", row.name, got, want)
		}
	}
}
