// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"sync"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// localLimits are what an instance decides by alone while its store fails, with
// on_store_error local. They belong to the store and are kept from one outage to
// the next: a store that comes and goes fills no bucket.
type localLimits struct {
	mu     sync.Mutex // guards below
	memory *limiters.Memory
	shares map[int64]bool // of how many instances it has decided by the share of one
}

// store returns the memory, which it makes with the first outage, to decide by the
// share of one of n instances.
func (l *localLimits) store(n int64) *limiters.Memory {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.memory == nil {
		l.memory, l.shares = limiters.NewMemory(0), map[int64]bool{}
	}
	l.shares[n] = true
	return l.memory
}

// reset fills the buckets of an identity up, whatever share they are, and reports
// whether there may be any.
func (l *localLimits) reset(id limiters.Identity, limits []*limiters.Limit) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for n := range l.shares {
		shares := make([]*limiters.Limit, len(limits))
		for i, limit := range limits {
			shares[i] = limit.Share(n)
		}
		_ = l.memory.Reset(context.Background(), id, shares) // never fails
	}
	return l.memory != nil
}

// made returns the memory, nil before the first outage.
func (l *localLimits) made() *limiters.Memory {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.memory
}

// close ends the memory, if there ever was one. Nobody may ask any more.
func (l *localLimits) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.memory != nil {
		_ = l.memory.Close() // never fails
	}
}

// sharers is the number of instances that share the store, as last heard.
func (s *store) sharers() int64 { return max(1, s.control.instances.Load()) }

// localShare is the share of a limit that one of n instances decides by.
type localShare struct {
	n     int64
	limit *limiters.Limit
}

// share returns the limit as one of n instances applies it alone. It is made once,
// because the names of what stores keep are the whole process's.
func (l *limitNumbers) share(n int64) *limiters.Limit {
	if s := l.local.Load(); s != nil && s.n == n {
		return s.limit
	}
	s := &localShare{n, l.limit.Share(n)}
	l.local.Store(s)
	return s.limit
}

// decideLocally answers what the store owes, which it has failed to answer: by
// this instance's share, one of as many as shared the store when last heard of.
// What is taken is in t. The answers are not to be learned as denials, which are
// those of whole limits.
func (a *attachment) decideLocally(v *verdict, asks []limiters.Ask, t *taken) {
	n := a.store.sharers()
	results := t.admission.Results
	var owed []limiters.Ask
	var at []int // in results and v.limits, of each check of owed
	first := 0
	for _, ask := range asks {
		from := first
		first += len(ask.Checks)
		if results[from].Outcome != limiters.Unknown {
			continue // all of an identity is answered, or nothing
		}
		checks := make([]limiters.Check, 0, len(ask.Checks))
		for i := from; i < first; i++ {
			l := &v.limits[i]
			checks = append(checks, limiters.Check{Limit: l.share(n), Dark: l.dark})
			at = append(at, i)
		}
		owed = append(owed, limiters.Ask{Identity: ask.Identity, Checks: checks})
	}
	memory := a.store.local.store(n)
	adm, _ := memory.Admit(context.Background(), owed) // never fails
	t.local = func() { memory.Release(adm) }
	t.admission.Allowed = adm.Allowed
	for i, result := range adm.Results {
		results[at[i]], v.limits[at[i]].local = result, true
	}
}
