// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// targetRequest names limits.
type targetRequest struct {
	Pool  string `json:"pool,omitempty"`
	Kind  string `json:"kind,omitempty"`
	Limit string `json:"limit,omitempty"`
}

func (t targetRequest) target() control.Target {
	return control.Target{Pool: t.Pool, Kind: t.Kind, Limit: t.Limit}
}

// noteRequest says who wants a change, why and for how long.
type noteRequest struct {
	TTL    string `json:"ttl,omitempty"` // a duration, such as 30m or 2d
	Reason string `json:"reason,omitempty"`
	Actor  string `json:"actor,omitempty"`
}

// defaultActor is who changes something if nobody says so.
const defaultActor = "admin API"

var errNoReason = errors.New("there is no reason; say why, for those who find it")

func (n noteRequest) parse() (time.Duration, control.Note, error) {
	if n.TTL == "" {
		return 0, control.Note{}, errors.New("there is no ttl; say after which time it ends by itself, such as 30m")
	}
	ttl, err := caddy.ParseDuration(n.TTL)
	if err != nil {
		return 0, control.Note{}, fmt.Errorf("ttl %q is no duration, such as 30m or 2d", n.TTL)
	}
	if n.Reason == "" {
		return 0, control.Note{}, errNoReason
	}
	return ttl, control.Note{Reason: n.Reason, Actor: cmp.Or(n.Actor, defaultActor)}, nil
}

// identityRequest says whom requests are counted under: by the hash that logs
// show, or by what the hash is of.
type identityRequest struct {
	Identity string `json:"identity,omitempty"`

	Source string   `json:"source,omitempty"` // of the value; default api_key
	Value  string   `json:"value,omitempty"`
	Values []string `json:"values,omitempty"` // of a source with several placeholders
}

func (i identityRequest) parse(o *operator) (limiters.Identity, error) {
	values := i.Values
	if i.Value != "" {
		values = append([]string{i.Value}, values...)
	}
	switch {
	case i.Identity != "" && len(values) > 0:
		return limiters.Identity{}, errors.New("there are an identity and a value; give one of them")
	case i.Identity != "":
		return parseIdentity(i.Identity)
	case len(values) > 0:
		return o.identityOf(cmp.Or(i.Source, sourceAPIKey), values...)
	}
	return limiters.Identity{}, errors.New("whose limits? Give an identity, as logs show it, or the value of a key")
}

type switchRequest struct {
	targetRequest
	All   bool   `json:"all,omitempty"`   // instead of a target: everything
	Mode  string `json:"mode,omitempty"`  // off, dark or enforce <percent>
	Scope string `json:"scope,omitempty"` // fleet (default) or instance
	noteRequest
}

// parse returns the target and the scope.
func (s switchRequest) parse() (control.Target, control.Scope, error) {
	target, scope := s.target(), control.Scope(cmp.Or(s.Scope, string(control.Fleet)))
	switch {
	case scope != control.Fleet && scope != control.Instance:
		return target, scope, fmt.Errorf("scope %q is not fleet or instance", s.Scope)
	case s.All && target != control.Target{}:
		return target, scope, errors.New("there are all and a target; give one of them")
	case !s.All && target == control.Target{}:
		return target, scope, errors.New("which limits? Name a pool, a kind or a limit, or say all")
	}
	return target, scope, nil
}

// changeAnswer says what became of a change.
type changeAnswer struct {
	// Message says it in words.
	Message string `json:"message"`

	// Pending says why it is in force on this instance alone so far.
	Pending string `json:"pending,omitempty"`

	Switch   *control.Switch   `json:"switch,omitempty"`
	Override *control.Override `json:"override,omitempty"`
}

// answer words what became of a change that concerns the fleet, or this instance
// alone.
func (o *operator) answer(done applied, err error, alone bool, what string) (changeAnswer, error) {
	switch {
	case control.IsNothing(err):
		return changeAnswer{}, adminError(http.StatusNotFound, "there is nothing to clear: none is set for exactly this target and scope; %s", o.inForceWords())
	case err != nil:
		return changeAnswer{}, badRequest(err)
	case done.Pending != nil:
		return changeAnswer{
			Message: fmt.Sprintf("%s on this instance ALONE so far: the store does not answer (%v). The others will follow when it does; in a hurry, ask each.", what, done.Pending),
			Pending: done.Pending.Error(),
		}, nil
	case alone || o.store.control.redis == nil:
		return changeAnswer{Message: what + " on this instance."}, nil
	}
	return changeAnswer{Message: what + " on every instance within " + o.store.control.soon() + "."}, nil
}

// inForceWords names the switches and overrides that could have been meant.
func (o *operator) inForceWords() string {
	view := o.view()
	var names []string
	for _, s := range view.Switches {
		names = append(names, fmt.Sprintf("%s (scope %s)", words(s.Target), s.Scope))
	}
	if n := len(view.Overrides); n > 0 {
		names = append(names, count(int64(n), "override"))
	}
	if len(names) == 0 {
		return "nothing is in force"
	}
	const most = 20
	return "in force are " + strings.Join(names[:min(len(names), most)], ", ")
}

// operated runs an endpoint on the running config.
func operated(do func(ctx context.Context, o *operator, r *http.Request) (any, error)) endpoint {
	return func(ctx context.Context, r *http.Request) (any, error) {
		o, err := operate()
		if err != nil {
			return nil, caddy.APIError{HTTPStatus: http.StatusServiceUnavailable, Err: err}
		}
		defer o.leave()
		return do(ctx, o, r)
	}
}

var listSwitches = operated(func(_ context.Context, o *operator, _ *http.Request) (any, error) {
	view := o.view()
	return struct {
		Version  int64            `json:"version"`
		Switches []control.Switch `json:"switches"`
	}{view.Version, append([]control.Switch{}, view.Switches...)}, nil
})

var setSwitch = operated(func(ctx context.Context, o *operator, r *http.Request) (any, error) {
	var in switchRequest
	if err := decodeBody(r, &in); err != nil {
		return nil, err
	}
	target, scope, err := in.parse()
	if err != nil {
		return nil, badRequest(err)
	}
	if in.Mode == "" {
		return nil, badRequest(errors.New("there is no mode; it is off, dark or enforce <percent>"))
	}
	mode, err := control.ParseMode(in.Mode)
	if err != nil {
		return nil, badRequest(err)
	}
	ttl, note, err := in.noteRequest.parse()
	if err != nil {
		return nil, badRequest(err)
	}
	set := control.Switch{Target: target, Mode: mode, Scope: scope, Note: note}
	done, err := o.setSwitch(ctx, set, ttl)
	answer, err := o.answer(done, err, scope == control.Instance, fmt.Sprintf("%s is %s for %s", words(target), modeSaid(mode), in.TTL))
	if err == nil {
		answer.Switch = o.findSwitch(target, scope)
	}
	return answer, err
})

// words is a target in a sentence.
func words(t control.Target) string {
	if t == (control.Target{}) {
		return "everything"
	}
	return t.String()
}

// modeSaid is the mode of a switch in a sentence.
func modeSaid(m control.Mode) string {
	if m > control.Dark {
		return fmt.Sprintf("enforced for %d%% of the identities", m.Percent())
	}
	return m.String()
}

// findSwitch returns the switch of exactly a target, as it is in force; nil if it
// has ended meanwhile.
func (o *operator) findSwitch(target control.Target, scope control.Scope) *control.Switch {
	view := o.view()
	for i := range view.Switches {
		if s := &view.Switches[i]; s.Scope == scope && s.Target == shedderTarget(target) {
			return s
		}
	}
	return nil
}

var clearSwitch = operated(func(ctx context.Context, o *operator, r *http.Request) (any, error) {
	var in switchRequest
	if err := decodeBody(r, &in); err != nil {
		return nil, err
	}
	target, scope, err := in.parse()
	if err != nil {
		return nil, badRequest(err)
	}
	if in.Mode != "" || in.noteRequest != (noteRequest{}) {
		return nil, badRequest(errors.New("clearing takes a target and a scope, and neither mode, ttl, reason nor actor"))
	}
	if in.All {
		done, err := o.clearSwitches(ctx, scope)
		return o.answer(done, err, scope == control.Instance, "every switch is cleared")
	}
	done, err := o.clearSwitch(ctx, target, scope)
	return o.answer(done, err, scope == control.Instance, "the switch of "+words(target)+" is cleared")
})

type overrideRequest struct {
	targetRequest
	identityRequest
	Requests int64 `json:"requests,omitempty"` // of rate, in the limit's own period
	Burst    int64 `json:"burst,omitempty"`
	Capacity int64 `json:"capacity,omitempty"` // of concurrency
	noteRequest
}

var listOverrides = operated(func(_ context.Context, o *operator, _ *http.Request) (any, error) {
	view := o.view()
	return struct {
		Version   int64              `json:"version"`
		Overrides []control.Override `json:"overrides"`
	}{view.Version, append([]control.Override{}, view.Overrides...)}, nil
})

var setOverride = operated(func(ctx context.Context, o *operator, r *http.Request) (any, error) {
	var in overrideRequest
	if err := decodeBody(r, &in); err != nil {
		return nil, err
	}
	id, err := in.identityRequest.parse(o)
	if err != nil {
		return nil, badRequest(err)
	}
	ttl, note, err := in.noteRequest.parse()
	if err != nil {
		return nil, badRequest(err)
	}
	set := control.Override{
		Target: in.target(), Identity: id.String(), Note: note,
		Requests: in.Requests, Burst: in.Burst, Capacity: in.Capacity,
	}
	if l, err := o.limit(set.Target); err == nil && l.Kind == limiters.Rate {
		set.Requests, set.Burst = inProportion(l, set.Requests, set.Burst)
	}
	done, err := o.setOverride(ctx, set, ttl)
	answer, err := o.answer(done, err, false, fmt.Sprintf("%s is overridden for %s, for %s,", set.Target, set.Identity, in.TTL))
	if err == nil {
		view := o.view()
		for i := range view.Overrides {
			if v := &view.Overrides[i]; v.Target == set.Target && v.Identity == set.Identity {
				answer.Override = v
			}
		}
	}
	return answer, err
})

// inProportion fills in what an override of a rate does not say: the same
// requests, or a burst that is as many times larger or smaller.
func inProportion(l *limiters.Limit, requests, burst int64) (int64, int64) {
	switch {
	case requests == 0 && burst > 0:
		requests = l.Requests
	case burst == 0 && requests > 0:
		scaled := math.Ceil(float64(l.Capacity) / float64(l.Requests) * float64(requests))
		burst = max(l.Cost, int64(min(scaled, limiters.MaxRequestsPerSecond*24*60*60)))
	}
	return requests, burst
}

var clearOverride = operated(func(ctx context.Context, o *operator, r *http.Request) (any, error) {
	var in overrideRequest
	if err := decodeBody(r, &in); err != nil {
		return nil, err
	}
	if in.Requests != 0 || in.Burst != 0 || in.Capacity != 0 || in.noteRequest != (noteRequest{}) {
		return nil, badRequest(errors.New("clearing takes a target and an identity or value, and neither numbers, ttl, reason nor actor"))
	}
	id, err := in.identityRequest.parse(o)
	if err != nil {
		return nil, badRequest(err)
	}
	done, err := o.clearOverride(ctx, in.target(), id)
	return o.answer(done, err, false, fmt.Sprintf("the override of %s for %s is cleared", in.target(), id))
})
