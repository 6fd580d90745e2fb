// SPDX-License-Identifier: Apache-2.0

// Package limiters holds the two per-user limiters of Stripe's post "Scaling
// your API with rate limiters": the token bucket (requests over time) and the
// concurrency limiter (requests in progress), on two stores that agree
// exactly: Redis, shared by a fleet, and the memory of one process.
//
// The package trades nothing of exactness for speed: each decision about an
// identity is one atomic step of its store, on the store's own clock. What it
// does trade is availability of limits for availability of the API: a store
// that fails returns an error and the caller lets the request pass.
//
// It knows no HTTP, no Caddy and no metrics.
package limiters

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"
)

// Identity is the keyed hash of what a request is counted under: an API key, a
// client address, a user. The zero Identity stands for none.
type Identity [16]byte

// String returns the identity as 32 hexadecimal digits, as it stands in Redis,
// logs and the admin API.
func (id Identity) String() string { return hex.EncodeToString(id[:]) }

// IsZero reports whether there is no identity.
func (id Identity) IsZero() bool { return id == Identity{} }

// Kind tells the two limiters apart.
type Kind uint8

// The kinds of limits.
const (
	Rate        Kind = iota + 1 // a token bucket: requests over time
	Concurrency                 // leases: requests in progress
)

// String returns the word that config, metrics and placeholders use.
func (k Kind) String() string {
	switch k {
	case Rate:
		return "rate"
	case Concurrency:
		return "concurrency"
	}
	return "unknown"
}

// Bounds of the numbers of a limit.
const (
	MaxRequestsPerSecond = 1_000_000
	MinLease             = time.Second
	MaxLease             = time.Hour
	DefaultLease         = 10 * time.Second

	// maxExact is 2^53: up to here every integer is exact in Lua, whose only
	// number is a double.
	maxExact = 1 << 53
)

// Limit is one named limit of a pool with its numbers. It is immutable and
// safe for concurrent use; NewRate and NewConcurrency make it.
type Limit struct {
	Pool string
	Kind Kind
	Name string

	// Capacity is the number of tokens in a full bucket (the burst), or the
	// number of leases that may be held at once.
	Capacity int64

	// Requests per Period is the refill rate of a bucket; Cost is what one
	// request takes.
	Requests int64
	Period   time.Duration
	Cost     int64

	// Lease is how long a concurrency slot outlives the last sign of life of
	// the instance that holds it.
	Lease time.Duration

	tick        time.Duration // resolution of the bucket's clock
	periodTicks int64         // Period in ticks; a token is this many units
	keys        stateName
	state       stateID
	args        []any // of admit.lua, up to the flag dark
}

// NewRate returns a token bucket limit: requests per period on average, at most
// capacity at once, cost tokens for each request. It fails if a number is below
// one, if the cost exceeds the capacity (such a request could never pass), if
// the rate exceeds MaxRequestsPerSecond or if the bucket's arithmetic would
// leave the integers that Lua represents exactly.
func NewRate(pool, name string, requests int64, period time.Duration, capacity, cost int64) (*Limit, error) {
	l := &Limit{
		Pool: pool, Kind: Rate, Name: name,
		Capacity: capacity, Requests: requests, Period: period, Cost: cost,
	}
	switch {
	case requests < 1:
		return nil, fmt.Errorf("rate: %d requests; at least 1 is needed (use mode off to switch a limit off)", requests)
	case period < time.Millisecond:
		return nil, fmt.Errorf("rate: period %s is shorter than 1ms", period)
	case capacity < 1:
		return nil, fmt.Errorf("rate: burst %d; at least 1 is needed", capacity)
	case cost < 1:
		return nil, fmt.Errorf("rate: cost %d; at least 1 is needed", cost)
	case cost > capacity:
		return nil, fmt.Errorf("rate: cost %d exceeds burst %d, so no request could ever pass; raise burst to at least %d", cost, capacity, cost)
	case float64(requests)/period.Seconds() > MaxRequestsPerSecond:
		return nil, fmt.Errorf("rate: %d requests per %s is more than %d a second", requests, period, MaxRequestsPerSecond)
	}
	// The clock of a bucket ticks in microseconds, or in milliseconds where
	// the period is so long that they would not fit. It depends on the period
	// alone, because the period is part of the key and the tick is not.
	l.tick = time.Microsecond
	if period > time.Minute {
		l.tick = time.Millisecond
	}
	if period%l.tick != 0 {
		return nil, fmt.Errorf("rate: period %s is not a whole number of %s", period, l.tick)
	}
	l.periodTicks = int64(period / l.tick)
	if capacity > maxExact/l.periodTicks {
		return nil, fmt.Errorf("rate: burst %d is too large for a period of %s; at most %d", capacity, period, maxExact/l.periodTicks)
	}
	l.keys = stateName{pool, ":r:" + name + ":" + period.String()}
	l.state = l.keys.id()
	l.args = []any{requests, l.capacityUnits(), l.costUnits(), l.tick.Microseconds()}
	return l, nil
}

// NewConcurrency returns a concurrency limit: at most capacity leases at once.
// A lease that its holder no longer renews ends by itself after lease, between
// MinLease and MaxLease.
func NewConcurrency(pool, name string, capacity int64, lease time.Duration) (*Limit, error) {
	switch {
	case capacity < 1:
		return nil, fmt.Errorf("concurrency: %d; at least 1 is needed (use mode off to switch a limit off)", capacity)
	case capacity > maxExact:
		return nil, fmt.Errorf("concurrency: %d is too large", capacity)
	case lease < MinLease || lease > MaxLease:
		return nil, fmt.Errorf("concurrency: lease %s is not between %s and %s", lease, MinLease, MaxLease)
	case lease%time.Millisecond != 0:
		return nil, fmt.Errorf("concurrency: lease %s is not a whole number of milliseconds", lease)
	}
	l := &Limit{
		Pool: pool, Kind: Concurrency, Name: name,
		Capacity: capacity, Cost: 1, Lease: lease,
		keys: stateName{pool, ":c:" + name},
		args: []any{capacity, lease.Microseconds()},
	}
	l.state = l.keys.id()
	return l, nil
}

// Equal reports whether two limits have the same name and numbers.
func (l *Limit) Equal(o *Limit) bool {
	return l.Pool == o.Pool && l.Kind == o.Kind && l.Name == o.Name &&
		l.Capacity == o.Capacity && l.Requests == o.Requests && l.Period == o.Period &&
		l.Cost == o.Cost && l.Lease == o.Lease
}

// Check asks for one limit to be applied to a request.
type Check struct {
	Limit *Limit
	// Dark decides and counts without ever denying.
	Dark bool
}

// Ask is everything that is asked about one identity. All its enforced checks
// pass, or none takes anything. A dark check is decided against the enforced
// ones and itself alone, and takes only when they all allow.
type Ask struct {
	Identity Identity
	Checks   []Check // at least one; rate limits before concurrency limits
}

// Outcome is the answer to one Check.
type Outcome uint8

// The outcomes of a check. The zero Outcome is that of a store that failed.
const (
	Unknown      Outcome = iota // the store did not answer
	Allowed                     // there is room
	Denied                      // there is none
	NotEvaluated                // a dark check beside an enforced one that denied
)

// String returns the label that metrics use.
func (o Outcome) String() string {
	switch o {
	case Allowed:
		return "allowed"
	case Denied:
		return "denied"
	case NotEvaluated:
		return "not_evaluated"
	}
	return "store_error"
}

// Result is the answer to one Check.
type Result struct {
	Outcome Outcome

	// Remaining is what is left after this request: whole tokens, or free
	// leases. It is that of before the request where nothing was taken.
	Remaining int64

	// RetryAfter is, for a denied bucket, the exact time until the bucket
	// holds the cost again; zero for concurrency, where no clock frees a slot.
	RetryAfter time.Duration

	// NextToken is the time until the bucket holds one token more, zero when
	// it is full.
	NextToken time.Duration
}

// Admission is the answer to the asks of one request. Release must be called
// with it exactly once, whether it allowed the request or not.
type Admission struct {
	// Allowed reports that no enforced check denied. Checks of an identity
	// whose store failed deny nothing.
	Allowed bool

	// Results holds one Result a check, in the order of the asks and of their
	// checks.
	Results []Result

	leases []*lease // taken, to be given back by Release
	room   *room    // for the first of them
}

// room is what most admissions need, in one piece.
type room struct {
	results [2]Result
	leases  [1]*lease
	lease   lease
}

// newAdmission returns an admission that allows, with room for results.
func newAdmission(results int) Admission {
	r := new(room)
	adm := Admission{Allowed: true, Results: r.results[:0], leases: r.leases[:0], room: r}
	if results > len(r.results) {
		adm.Results = make([]Result, 0, results)
	}
	return adm
}

// take adds a lease, which it returns.
func (a *Admission) take(key stateKey, id uint64, length time.Duration) *lease {
	var l *lease
	if len(a.leases) == 0 && a.room != nil {
		l = &a.room.lease
	} else {
		l = new(lease)
	}
	l.key, l.id, l.length = key, id, length
	a.leases = append(a.leases, l)
	return l
}

// Store decides asks. Its implementations, Redis and Memory, agree exactly.
type Store interface {
	// Admit decides the asks of one request, in one round trip. Where one
	// identity is denied, leases taken for the others are given back (tokens
	// are not). The error tells that the store failed for at least one
	// identity; the Admission is valid all the same. The asks must not be changed
	// any more, whatever is done with the Admission.
	Admit(ctx context.Context, asks []Ask) (Admission, error)

	// Release gives back the leases of an admission. It never blocks on the
	// network and never fails: what cannot be sent now is sent later.
	Release(Admission)

	// Inspect returns what the store holds of an identity, for each of the limits.
	// It takes nothing and changes nothing.
	Inspect(ctx context.Context, id Identity, limits []*Limit) ([]Inspection, error)

	// Reset drops what the store holds of an identity: buckets are full, and
	// leases free until requests that still run renew theirs. Denials remember;
	// see ForgetIdentity.
	Reset(ctx context.Context, id Identity, limits []*Limit) error

	// Close ends background work after flushing releases that are still
	// unsent, and closes connections.
	Close() error
}
