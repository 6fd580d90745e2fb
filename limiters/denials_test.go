// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// learned is the answer of a store, in brief: the results of the first ask.
func learned(results ...Result) Admission {
	adm := Admission{Allowed: true, Results: results}
	for _, r := range results {
		adm.Allowed = adm.Allowed && r.Outcome == Allowed
	}
	return adm
}

func denied(wait time.Duration) Result { return Result{Outcome: Denied, RetryAfter: wait} }

func TestDenials_Rate(t *testing.T) {
	l := rate(t, "rate", 10, time.Second, 50, 1)
	expensive := rate(t, "rate", 10, time.Second, 50, 5)
	raised := rate(t, "rate", 20, time.Second, 50, 1)
	larger := rate(t, "rate", 10, time.Second, 60, 1)
	slower := rate(t, "rate", 600, time.Minute, 50, 1)
	other := rate(t, "other", 10, time.Second, 50, 1)

	d := NewDenials()
	// The request was sent at 0; its answer, which came later, said 100 ms.
	d.Learn(epoch, ask("a", l), learned(denied(100*ms)))
	rows := []struct {
		at    time.Duration
		asks  []Ask
		known string // "" if the store is to be asked
	}{
		{0, ask("a", l), "denied 0 wait 100ms"},
		{30 * ms, ask("a", l), "denied 0 wait 70ms"},
		{30 * ms, ask("a", expensive), "denied 0 wait 70ms"}, // it waits at least as long
		{30 * ms, ask("b", l), ""},
		{30 * ms, ask("a", raised), ""}, // a denial says nothing of other numbers
		{30 * ms, ask("a", larger), ""},
		{30 * ms, ask("a", slower), ""},
		{30 * ms, ask("a", other), ""},
		{30 * ms, ask("a", other, l), "store_error 0; denied 0 wait 70ms"},
		{30 * ms, append(ask("b", l), ask("a", l)...), "store_error 0; denied 0 wait 70ms"},
		{30 * ms, []Ask{{id("a"), []Check{{l, true}}}}, ""}, // dark denies nobody
		{30 * ms, []Ask{{id("a"), []Check{{l, false}, {other, true}}}}, "denied 0 wait 70ms; not_evaluated 0"},
		{100*ms - time.Nanosecond, ask("a", l), "denied 0 wait 1ns"},
		{100 * ms, ask("a", l), ""},
		{50 * ms, ask("a", l), ""}, // forgotten
	}
	for i, row := range rows {
		adm, known := d.Denied(epoch.Add(row.at), row.asks)
		if got := briefly(adm.Results); known != (row.known != "") || got != row.known || adm.Allowed {
			t.Errorf("row %d: got %v %q, want %q", i, known, got, row.known)
		}
	}

	// A denial at a higher cost says nothing of a lower one.
	d.Learn(epoch, ask("a", expensive), learned(denied(100*ms)))
	if _, known := d.Denied(epoch, ask("a", l)); known {
		t.Error("a cost of 1 is denied because 5 were too many")
	}
	if _, known := d.Denied(epoch, ask("a", expensive)); !known {
		t.Error("a cost of 5 is not known to be denied")
	}
}

func TestDenials_LearnsFromDenialsOnly(t *testing.T) {
	l, other := rate(t, "rate", 10, time.Second, 50, 1), rate(t, "other", 10, time.Second, 50, 1)
	d := NewDenials()
	d.Learn(epoch, ask("a", l, other), learned(Result{Outcome: Allowed}, denied(100*ms)))
	d.Learn(epoch, ask("b", l), learned(Result{})) // the store failed
	d.Learn(epoch, []Ask{{id("c"), []Check{{l, true}}}}, learned(denied(100*ms)))
	for _, asks := range [][]Ask{ask("a", l), ask("b", l), ask("c", l)} {
		if _, known := d.Denied(epoch, asks); known {
			t.Errorf("%v is denied", asks[0].Identity)
		}
	}
	if _, known := d.Denied(epoch, ask("a", other)); !known {
		t.Error("the denial is not known")
	}
}

// A full concurrency limit is believed to be full for ten milliseconds. Then one
// request asks, and the others wait for what it learns.
func TestDenials_Concurrency(t *testing.T) {
	two, three := concurrency(t, "two", 2, 10*time.Second), concurrency(t, "two", 3, 10*time.Second)
	bucket := rate(t, "rate", 10, time.Second, 50, 1)
	full, free := learned(denied(0)), learned(Result{Outcome: Allowed})
	lease := Admission{leases: []*lease{{key: two.stateKey(id("a"))}}}
	d := NewDenials()
	rows := []struct {
		at    time.Duration
		do    func(now time.Time)
		asks  []Ask
		known bool
	}{
		{0, nil, ask("a", two), false},
		{0, nil, ask("a", two), false}, // nothing is known yet
		{0, func(now time.Time) { d.Learn(now, ask("a", two), full) }, ask("a", two), true},
		{0, nil, ask("a", bucket, two), true},
		{0, nil, ask("b", two), false},
		{0, nil, ask("a", three), false}, // other numbers
		{9 * ms, nil, ask("a", two), true},
		{10 * ms, nil, ask("a", two), false}, // this one asks
		{10 * ms, nil, ask("a", two), true},
		{19 * ms, nil, ask("a", two), true},
		{20 * ms, nil, ask("a", two), false}, // no answer came: the next one
		{21 * ms, func(now time.Time) { d.Learn(now, ask("a", two), full) }, ask("a", two), true},
		{30 * ms, nil, ask("a", two), true},
		{31 * ms, nil, ask("a", two), false},
		{31 * ms, func(now time.Time) { d.Learn(now, ask("a", two), free) }, ask("a", two), false},
		{31 * ms, nil, ask("a", two), false},
		{32 * ms, func(now time.Time) { d.Learn(now, ask("a", two), full) }, ask("a", two), true},
		{33 * ms, func(time.Time) { d.Ended(lease) }, ask("a", two), false},
		{34 * ms, func(now time.Time) { d.Learn(now, ask("a", two), full) }, ask("a", two), true},
		{35 * ms, func(now time.Time) { d.Learn(now, ask("a", two), learned(Result{})) }, ask("a", two), false}, // the store failed
		// One who is denied for another reason is not the one who asks.
		{40 * ms, func(now time.Time) { d.Learn(now, ask("a", bucket, two), learned(denied(20*ms), denied(0))) }, ask("a", two), true},
		{51 * ms, nil, ask("a", bucket, two), true},
		{51 * ms, nil, ask("a", two), false},
	}
	for i, row := range rows {
		now := epoch.Add(row.at)
		if row.do != nil {
			row.do(now)
		}
		if _, known := d.Denied(now, row.asks); known != row.known {
			t.Errorf("row %d, at %v: got %v, want %v", i, row.at, known, row.known)
		}
	}
}

func TestDenials_Forget(t *testing.T) {
	l := rate(t, "rate", 1, 24*time.Hour, 1, 1)
	d := NewDenials()
	d.Learn(epoch, ask("a", l), learned(denied(24*time.Hour)))
	d.forgetAt(epoch.Add(time.Second))
	// An answer of before the reset arrives after it.
	d.Learn(epoch.Add(ms), ask("a", l), learned(denied(24*time.Hour)))
	if _, known := d.Denied(epoch.Add(time.Second), ask("a", l)); known {
		t.Error("a denial of before the reset is remembered")
	}
	d.Learn(epoch.Add(time.Second), ask("a", l), learned(denied(24*time.Hour)))
	if _, known := d.Denied(epoch.Add(time.Second), ask("a", l)); !known {
		t.Error("a denial of after the reset is not")
	}
	d.Forget()
	if _, known := d.Denied(epoch.Add(time.Second), ask("a", l)); known {
		t.Error("Forget forgets nothing")
	}
}

func TestDenials_Bounded(t *testing.T) {
	l := rate(t, "rate", 1, time.Hour, 1, 1)
	d := NewDenials()
	count := func() (n int) {
		for i := range d.shards {
			n += len(d.shards[i].denials)
		}
		return n
	}
	learn := func(first, n uint64, now time.Time, wait time.Duration) {
		for i := range n {
			var who Identity
			binary.BigEndian.PutUint64(who[8:], first+i)
			binary.LittleEndian.PutUint64(who[8:], first+i)
			d.Learn(now, []Ask{{who, []Check{{Limit: l}}}}, learned(denied(wait)))
		}
	}
	learn(0, 2*maxDenials, epoch, time.Second)
	if got := count(); got != maxDenials {
		t.Errorf("remembers %d denials, want %d", got, maxDenials)
	}
	// When they have passed they make room for new ones.
	learn(10*maxDenials, 10, epoch.Add(time.Hour), time.Hour)
	if got, most := count(), maxDenials-15; got > most {
		t.Errorf("remembers %d denials, want at most %d, as others have passed", got, most)
	}
}

// Of many requests at once, one asks.
func TestDenials_OneAsks(t *testing.T) {
	two := concurrency(t, "two", 2, 10*time.Second)
	d := NewDenials()
	d.Learn(epoch, ask("a", two), learned(denied(0)))
	var asking atomic.Int64
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, known := d.Denied(epoch.Add(refusalMemory), ask("a", two)); !known {
				asking.Add(1)
			}
		})
	}
	wg.Wait()
	if got := asking.Load(); got != 1 {
		t.Errorf("%d ask, want 1", got)
	}
}

// What the cache says is what the store would say: a client that is denied from
// memory is never one whom the store would allow.
func TestDenials_AgreeWithTheStore(t *testing.T) {
	m := newMemory(0)
	d := NewDenials()
	limits := []*Limit{rate(t, "rate", 7, time.Second, 3, 1), rate(t, "rate", 7, time.Second, 3, 2), rate(t, "other", 90, time.Minute, 2, 1)}
	cached, asked := 0, 0
	for i := range 20_000 {
		at := epoch.Add(time.Duration(i) * 1700 * time.Microsecond)
		asks := ask("a", limits[i%2], limits[2])
		_, known := d.Denied(at, asks)
		if !known {
			asked++
			// The answer is made somewhat later than the question.
			d.Learn(at, asks, m.admitAt(at.Add(300*time.Microsecond).UnixMicro(), asks))
			continue
		}
		cached++
		if m.admitAt(at.UnixMicro(), asks).Allowed {
			t.Fatalf("request %d is denied from memory, but there is room", i)
		}
	}
	if cached < 19_000 {
		t.Errorf("answered %d from memory and asked %d times, want nearly all from memory", cached, asked)
	}
}
