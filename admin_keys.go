// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// maxLeasesShown bounds the leases that an answer lists.
const maxLeasesShown = 100

type keyRequest struct {
	Pool string `json:"pool,omitempty"` // default: every pool
	identityRequest
}

// inspection is what one identity has left, by limit.
type inspection struct {
	Identity string `json:"identity"`

	// Where the figures are from: "store"; or "local", what this instance decides
	// by alone (on_store_error local) because the store fails, for this reason.
	From       string           `json:"from"`
	StoreError string           `json:"store_error,omitempty"`
	Limits     []inspectedLimit `json:"limits"`
}

// Where an inspection is from.
const (
	fromStore = "store"
	fromLocal = "local"
)

type inspectedLimit struct {
	Pool    string `json:"pool"`
	Kind    string `json:"kind"`
	Limit   string `json:"limit"`
	Numbers string `json:"numbers"` // in words, with the override in force; of local also which share
	Mode    string `json:"mode"`    // that switches leave at most

	// Seconds until a request would be allowed; 0: now.
	NextAllowed float64 `json:"next_allowed"`

	// Of rate: whole tokens, what a full bucket holds, and seconds until it does.
	Tokens *int64   `json:"tokens,omitempty"`
	Burst  int64    `json:"burst,omitempty"`
	Full   *float64 `json:"full,omitempty"`

	// Of concurrency: how many leases there are, how many there may be, and the
	// first to end.
	InProgress *int64        `json:"in_progress,omitempty"`
	Capacity   int64         `json:"capacity,omitempty"`
	Leases     []leaseStatus `json:"leases,omitempty"`

	Override *control.Override `json:"override,omitempty"`
}

type leaseStatus struct {
	Instance string  `json:"instance,omitempty"` // that holds it
	Age      float64 `json:"age"`                // seconds; 0: not known
	Ends     float64 `json:"ends"`               // seconds from now, unless it is renewed
}

var inspectKey = operated(func(ctx context.Context, o *operator, r *http.Request) (any, error) {
	var in keyRequest
	id, err := decodeKey(o, r, &in, &in.identityRequest)
	if err != nil {
		return nil, err
	}
	found, err := o.inspect(ctx, in.Pool, id)
	if err != nil && found == nil {
		return nil, keyError(err)
	}
	answer := inspection{Identity: id.String(), From: fromStore, Limits: make([]inspectedLimit, 0, len(found))}
	if err != nil {
		answer.From, answer.StoreError = fromLocal, limiters.Reason(err)
	}
	for i := range found {
		answer.Limits = append(answer.Limits, newInspectedLimit(&found[i]))
	}
	return answer, nil
})

func newInspectedLimit(found *inspected) inspectedLimit {
	l := found.Limit
	shown := inspectedLimit{
		Pool: l.Pool, Kind: l.Kind.String(), Limit: l.Name,
		Numbers: found.Numbers, Mode: found.Mode.String(),
		NextAllowed: found.NextAllowed.Seconds(), Override: found.Override,
	}
	if l.Kind == limiters.Rate {
		full := found.Full.Seconds()
		shown.Tokens, shown.Burst, shown.Full = &found.Tokens, l.Capacity, &full
		return shown
	}
	shown.InProgress, shown.Capacity = &found.Live, l.Capacity
	for _, lease := range found.Leases[:min(len(found.Leases), maxLeasesShown)] {
		shown.Leases = append(shown.Leases, leaseStatus{lease.Instance, lease.Age.Seconds(), lease.Ends.Seconds()})
	}
	return shown
}

type resetRequest struct {
	keyRequest
	Leases bool   `json:"leases,omitempty"` // free its concurrency slots, too
	Reason string `json:"reason,omitempty"`
	Actor  string `json:"actor,omitempty"`
}

var resetKey = operated(func(ctx context.Context, o *operator, r *http.Request) (any, error) {
	var in resetRequest
	id, err := decodeKey(o, r, &in, &in.identityRequest)
	if err != nil {
		return nil, err
	}
	if in.Reason == "" {
		return nil, badRequest(errNoReason)
	}
	done, err := o.reset(ctx, in.Pool, id, in.Leases, in.Reason, cmp.Or(in.Actor, defaultActor))
	if err != nil {
		return nil, keyError(err)
	}
	return o.answer(done, nil, false, fmt.Sprintf("the buckets of %s are full", id))
})

// decodeKey reads a request about an identity, which is part of it.
func decodeKey(o *operator, r *http.Request, in any, identity *identityRequest) (limiters.Identity, error) {
	if err := decodeBody(r, in); err != nil {
		return limiters.Identity{}, err
	}
	id, err := identity.parse(o)
	if err != nil {
		return id, badRequest(err)
	}
	return id, nil
}

// keyError is the error of a question about an identity: the caller's fault, or
// that of the store.
func keyError(err error) error {
	if errors.Is(err, errLocalReset) {
		return adminError(http.StatusServiceUnavailable, "the store does not answer: %w", err)
	}
	if limiters.Reason(err) == "other" {
		return badRequest(err)
	}
	return adminError(http.StatusServiceUnavailable, "the store does not answer, so nothing is known and nothing was changed: %w", err)
}
