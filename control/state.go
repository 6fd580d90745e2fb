// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// State is everything that is set for a fleet. It is immutable: changes make
// another one.
type State struct {
	// Version counts the changes. Two states of one version differ in Tag: they
	// were made on both sides of a failover.
	Version int64  `json:"version"`
	Tag     string `json:"tag"`

	// At is when the version was made.
	At time.Time `json:"at"`

	Switches  []Switch   `json:"switches,omitempty"`
	Overrides []Override `json:"overrides,omitempty"`

	// Resets are the latest ones, so that instances forget what they remember of
	// an identity.
	Resets []Reset `json:"resets,omitempty"`
}

// Reset tells that the buckets of an identity were filled up by hand.
type Reset struct {
	At       time.Time `json:"at"`
	Identity string    `json:"identity"`
}

// ID names the state among all; empty for the zero State.
func (s *State) ID() string {
	if s.Version == 0 {
		return ""
	}
	return strconv.FormatInt(s.Version, 10) + " " + s.Tag
}

// Encode returns the state as the store keeps it.
func (s *State) Encode() string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // none of its types can fail
	}
	return string(text)
}

// Decode reads a state. What it does not believe it leaves out; the error tells
// of a text that is no state at all.
func Decode(text string) (State, error) {
	var s State
	if text == "" {
		return s, nil
	}
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return State{}, fmt.Errorf("state: %w", err)
	}
	if s.Version < 0 {
		return State{}, errors.New("state: a version below 0")
	}
	s.Switches = slices.DeleteFunc(s.Switches, func(w Switch) bool { return w.Scope != Fleet || w.Validate() != nil })
	s.Overrides = slices.DeleteFunc(s.Overrides, func(o Override) bool { return o.Validate() != nil })
	s.Switches = s.Switches[:min(len(s.Switches), MaxSwitches)]
	s.Overrides = s.Overrides[:min(len(s.Overrides), MaxOverrides)]
	s.Resets = s.Resets[max(0, len(s.Resets)-maxResets):]
	return s, nil
}

// Change is one thing that somebody wants changed: exactly one of the pointers
// is set, or Every.
type Change struct {
	At time.Time `json:"at"`

	// TTL, if not zero, says when what is set ends; else its Until does.
	TTL time.Duration `json:"-"`

	Set      *Switch   `json:"set,omitempty"`
	Clear    *Target   `json:"clear,omitempty"`     // the switch of exactly this target
	ClearAll bool      `json:"clear_all,omitempty"` // every switch
	Override *Override `json:"override,omitempty"`
	Drop     *Dropped  `json:"drop,omitempty"`  // an override
	Reset    string    `json:"reset,omitempty"` // an identity
}

// Dropped names an override.
type Dropped struct {
	Target
	Identity string `json:"identity"`
}

// errNothing is returned for a change that changes nothing.
var errNothing = errors.New("nothing is set there")

// IsNothing reports whether a change failed because what it was to clear is not
// set.
func IsNothing(err error) bool { return errors.Is(err, errNothing) }

// apply makes the change at now. A change that waited while another was made
// to the same thing has come too late, and changes nothing.
func (s State) apply(now time.Time, c Change) (State, error) {
	s = s.prune(now)
	switch {
	case c.Set != nil:
		w := *c.Set
		if err := w.Validate(); err != nil {
			return s, err
		}
		var err error
		s.Switches, err = put(s.Switches, w, MaxSwitches, func(o Switch) bool { return o.Target == w.Target }, now)
		return s, err
	case c.Clear != nil, c.ClearAll:
		before := len(s.Switches)
		s.Switches = slices.DeleteFunc(slices.Clone(s.Switches), func(o Switch) bool {
			return (c.ClearAll || o.Target == *c.Clear) && !o.Since.After(c.At)
		})
		if len(s.Switches) == before {
			return s, errNothing
		}
	case c.Override != nil:
		n := *c.Override
		if err := n.Validate(); err != nil {
			return s, err
		}
		var err error
		s.Overrides, err = put(s.Overrides, n, MaxOverrides, func(o Override) bool { return o.key() == n.key() }, now)
		return s, err
	case c.Drop != nil:
		before := len(s.Overrides)
		key := overrideKey{c.Drop.Target, c.Drop.Identity}
		s.Overrides = slices.DeleteFunc(slices.Clone(s.Overrides), func(o Override) bool {
			return o.key() == key && !o.Since.After(c.At)
		})
		if len(s.Overrides) == before {
			return s, errNothing
		}
	case c.Reset != "":
		resets := append(slices.Clone(s.Resets), Reset{c.At, c.Reset})
		s.Resets = resets[max(0, len(resets)-maxResets):]
	}
	return s, nil
}

// noted is what has a Note.
type noted interface{ Switch | Override }

func note[T noted](item T) Note {
	switch item := any(item).(type) {
	case Switch:
		return item.Note
	case Override:
		return item.Note
	}
	panic("unreachable")
}

// put returns items with one more, in place of the one that is the same.
func put[T noted](items []T, item T, most int, same func(T) bool, now time.Time) ([]T, error) {
	if !note(item).InForce(now) {
		return items, errNothing
	}
	if i := slices.IndexFunc(items, same); i >= 0 {
		if note(items[i]).Since.After(note(item).Since) {
			return items, errNothing
		}
		items = slices.Clone(items)
		items[i] = item
		return items, nil
	}
	if len(items) >= most {
		return items, fmt.Errorf("%d are set already, and no more can be; clear some first", most)
	}
	return append(slices.Clip(items), item), nil
}

// prune returns the state without what has ended.
func (s State) prune(now time.Time) State {
	s.Switches = pruned(s.Switches, now)
	s.Overrides = pruned(s.Overrides, now)
	return s
}

func pruned[T noted](items []T, now time.Time) []T {
	ended := func(item T) bool { return !note(item).InForce(now) }
	if !slices.ContainsFunc(items, ended) {
		return items
	}
	return slices.DeleteFunc(slices.Clone(items), ended)
}

// ends returns when the first of the items ends; zero if there are none.
func ends[T noted](first time.Time, items []T) time.Time {
	for _, item := range items {
		if until := note(item).Until; first.IsZero() || until.Before(first) {
			first = until
		}
	}
	return first
}

// sortSwitches orders switches for people: by target, the fleet's first.
func sortSwitches(switches []Switch) {
	slices.SortFunc(switches, func(a, b Switch) int {
		return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Scope, b.Scope))
	})
}
