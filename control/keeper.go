// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// Keeper is what one instance knows of switches and overrides, and how it agrees
// with the others. The zero Keeper knows nothing. It is not safe for concurrent
// use.
//
// A change is in force here at once, and waits (Pending) until it is in the
// store. To agree with the store, ask it what it holds, tell Heard, write what
// Next returns if the store still holds what was heard, tell Wrote or Heard, and
// so on until there is nothing to write.
type Keeper struct {
	agreed  State    // as the store has, or had
	pending []Change // not yet in the store, in their order
	local   []Switch // of scope instance

	stored string  // id of the state that the store is believed to hold
	news   []State // that the store holds although it has lost ours
}

// saved is what survives a restart.
type saved struct {
	State   State    `json:"state"`
	Pending []Change `json:"pending,omitempty"`
}

// Save returns what Load reads after a restart.
func (k *Keeper) Save() []byte {
	text, err := json.Marshal(saved{k.agreed, k.pending})
	if err != nil {
		panic(err) // none of its types can fail
	}
	return text
}

// Load begins with what was saved.
func (k *Keeper) Load(text []byte) error {
	var s saved
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	state, err := Decode(s.State.Encode())
	if err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	k.agreed, k.pending = state, s.Pending[:min(len(s.Pending), maxPending)]
	k.stored = state.ID()
	return nil
}

// Known is the id of the state that needs no telling, and Stored that which the
// store is believed to hold.
func (k *Keeper) Known() string { return k.agreed.ID() }

// Stored is the id of the state that the store is believed to hold.
func (k *Keeper) Stored() string { return k.stored }

// Waiting reports how many changes are not in the store yet.
func (k *Keeper) Waiting() int { return len(k.pending) }

// Version is that of the state that was agreed on last.
func (k *Keeper) Version() int64 { return k.agreed.Version }

// Change makes a change, at now. It is in force here at once. What concerns the
// fleet waits to be written.
func (k *Keeper) Change(now time.Time, c Change) error {
	c = c.at(now)
	if c.Set != nil && c.Set.Scope == Instance {
		s, err := State{Switches: k.local}.apply(now, c)
		if err == nil {
			k.local = s.Switches
		}
		return err
	}
	if len(k.pending) >= maxPending {
		return fmt.Errorf("%d changes wait for the store already; it must come back first", maxPending)
	}
	if _, err := k.fleet(now).apply(now, c); err != nil {
		return err
	}
	k.pending = append(k.pending, c)
	return nil
}

// at returns the change as of now, with times as they are after a journey through
// the store.
func (c Change) at(now time.Time) Change {
	tidy := func(t time.Time) time.Time { return t.UTC().Truncate(time.Millisecond) }
	c.At = tidy(now)
	if c.Set != nil {
		w := *c.Set
		w.Since, w.Until = c.At, tidy(w.Until)
		if c.TTL != 0 {
			w.Until = tidy(c.At.Add(c.TTL))
		}
		c.Set = &w
	}
	if c.Override != nil {
		o := *c.Override
		o.Since, o.Until = c.At, tidy(o.Until)
		if c.TTL != 0 {
			o.Until = tidy(c.At.Add(c.TTL))
		}
		c.Override = &o
	}
	c.TTL = 0
	return c
}

// ClearLocal makes a change that clears switches of scope instance.
func (k *Keeper) ClearLocal(now time.Time, c Change) error {
	c = c.at(now)
	s, err := State{Switches: k.local}.apply(now, c)
	if err == nil {
		k.local = s.Switches
	}
	return err
}

// fleet is the state with the pending changes.
func (k *Keeper) fleet(now time.Time) State {
	s := k.agreed.prune(now)
	for _, c := range k.pending {
		if next, err := s.apply(now, c); err == nil {
			s = next
		}
	}
	return s
}

// Lost tells of a store that had lost what we know.
type Lost struct{ Had, Knows int64 } // versions

// Heard takes down that the store holds a state: its id, and itself unless it is
// the Known one. A state that is newer than ours is adopted. An older one, or
// none, shows that the store has lost data: ours is kept, to be written back, and
// lost is not nil the first time.
func (k *Keeper) Heard(id string, s State) (lost *Lost) {
	before := k.stored
	k.stored, k.news = id, nil
	switch {
	case id == k.agreed.ID():
	case s.Version >= k.agreed.Version: // of equal ones, that which others can see
		k.agreed = s
	default:
		k.news = []State{s}
		if before != id {
			return &Lost{s.Version, k.agreed.Version}
		}
	}
	return nil
}

// Next returns the state to write over the Stored one, at now and with a tag of
// its own, and the number of pending changes in it; nil if the store has all.
func (k *Keeper) Next(now time.Time, tag string) (next *State, changes int) {
	s := k.agreed
	changed := false
	if k.stored == s.ID() && len(k.pending) == 0 {
		return nil, 0
	}
	// What was set after the loss, by somebody who did not know what we know, is
	// no less wanted than what we know. What is older was lost, or cleared.
	for _, news := range k.news {
		for _, w := range news.Switches {
			changed = k.merge(&s, now, Change{At: now, Set: &w}, w.Note) || changed
		}
		for _, o := range news.Overrides {
			changed = k.merge(&s, now, Change{At: now, Override: &o}, o.Note) || changed
		}
	}
	for _, c := range k.pending {
		if applied, err := s.apply(now, c); err == nil {
			s, changed = applied, true
		}
	}
	if changed {
		s.Version, s.Tag, s.At = k.agreed.Version+1, tag, now
	} else if k.stored == s.ID() || s.Version == 0 {
		// The pending changes are of no use any more.
		k.pending = nil
		return nil, 0
	}
	return &s, len(k.pending)
}

func (k *Keeper) merge(s *State, now time.Time, c Change, n Note) bool {
	if !n.Since.After(k.agreed.At) {
		return false
	}
	merged, err := s.apply(now, c)
	if err == nil {
		*s = merged
	}
	return err == nil
}

// Wrote takes down that the store now holds a state that Next had returned with
// so many changes.
func (k *Keeper) Wrote(s *State, changes int) {
	k.agreed, k.stored, k.news = *s, s.ID(), nil
	k.pending = slices.Clone(k.pending[min(changes, len(k.pending)):])
}

// View is what is in force at one time. It is immutable.
type View struct {
	Version   int64      `json:"version"`
	Waiting   int        `json:"waiting,omitempty"` // changes that are not in the store yet
	Switches  []Switch   `json:"switches"`
	Overrides []Override `json:"overrides"`

	resets []Reset
	ends   time.Time
}

// View returns what is in force at now.
func (k *Keeper) View(now time.Time) *View {
	k.local = pruned(k.local, now)
	s := k.fleet(now)
	v := &View{
		Version:   s.Version,
		Waiting:   len(k.pending),
		Switches:  append(slices.Clone(s.Switches), k.local...),
		Overrides: slices.Clone(s.Overrides),
		resets:    s.Resets,
	}
	sortSwitches(v.Switches)
	v.ends = ends(ends(time.Time{}, v.Switches), v.Overrides)
	return v
}

// Ends is when the first of what is in force ends; zero if nothing is.
func (v *View) Ends() time.Time { return v.ends }

// Mode is the weakest mode that switches demand of a limit or shedder; Enforce if
// none does.
func (v *View) Mode(pool, kind, limit string) Mode {
	mode := Enforce
	for i := range v.Switches {
		if s := &v.Switches[i]; s.Covers(pool, kind, limit) {
			mode = min(mode, s.Mode)
		}
	}
	return mode
}

// Local returns the switches of scope instance, which another Keeper of this
// process may take over.
func (k *Keeper) Local() []Switch { return slices.Clone(k.local) }

// TakeOver takes the switches of scope instance over from another Keeper.
func (k *Keeper) TakeOver(switches []Switch) { k.local = slices.Clone(switches) }

// Action is what has happened to a switch or an override.
type Action string

// The actions.
const (
	WasSet     Action = "set"
	WasCleared Action = "cleared"
	HasExpired Action = "expired"
)

// Event is one thing that differs between two views; one of the pointers is set.
type Event struct {
	Action   Action
	Switch   *Switch
	Override *Override
}

// Since returns what has happened between an older view and v, at now.
func (v *View) Since(old *View, now time.Time) (events []Event) {
	changes(old.Switches, v.Switches, now, func(s Switch) any { return [2]any{s.Target, s.Scope} }, func(a Action, s *Switch) {
		events = append(events, Event{Action: a, Switch: s})
	})
	changes(old.Overrides, v.Overrides, now, func(o Override) any { return o.key() }, func(a Action, o *Override) {
		events = append(events, Event{Action: a, Override: o})
	})
	return events
}

func changes[T noted](old, now []T, at time.Time, key func(T) any, tell func(Action, *T)) {
	before := make(map[any]T, len(old))
	for _, item := range old {
		before[key(item)] = item
	}
	for _, item := range now {
		was, ok := before[key(item)]
		delete(before, key(item))
		if !ok || any(was) != any(item) {
			tell(WasSet, &item)
		}
	}
	for _, item := range old {
		if _, gone := before[key(item)]; !gone {
			continue
		}
		if note(item).InForce(at) {
			tell(WasCleared, &item)
		} else {
			tell(HasExpired, &item)
		}
	}
}

// Stale returns the identities of which something is remembered that v, and not
// the older view, says is no longer so: their numbers have changed, or they were
// reset. With all it is every identity.
func (v *View) Stale(old *View, now time.Time) (identities []string, all bool) {
	for _, e := range v.Since(old, now) {
		if e.Override != nil {
			identities = append(identities, e.Override.Identity)
		}
	}
	seen := make(map[Reset]bool, len(old.resets))
	for _, r := range old.resets {
		seen[r] = true
	}
	fresh := 0
	for _, r := range v.resets {
		if !seen[r] {
			fresh++
			identities = append(identities, r.Identity)
		}
	}
	return identities, fresh == maxResets // there may have been more
}
