// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// store is what instances share: it compares and swaps.
type store struct {
	state State
	down  bool
	tags  int
}

// agree lets an instance agree with the store, at a time; it tells what was lost.
func (s *store) agree(t *testing.T, k *Keeper, after time.Duration) (lost *Lost) {
	t.Helper()
	if s.down {
		return nil
	}
	for range 5 {
		s.tags++
		next, changes := k.Next(at(after), fmt.Sprint("tag", s.tags))
		if next != nil && s.state.ID() == k.Stored() {
			s.state = *next
			k.Wrote(next, changes)
			continue
		}
		heard := s.state
		if heard.ID() == k.Known() {
			heard = State{} // which need not be told
		}
		if l := k.Heard(s.state.ID(), heard); l != nil {
			lost = l
		}
		if next, _ := k.Next(at(after), ""); next == nil {
			return lost
		}
	}
	t.Fatal("they never agree")
	return nil
}

// modes are the switches of a view: "api=dark *=off".
func modes(v *View) string {
	var all []string
	for _, s := range v.Switches {
		all = append(all, s.Target.String()+"="+s.Mode.String())
	}
	for _, o := range v.Overrides {
		all = append(all, fmt.Sprintf("%s=%d", o.Target, o.Requests))
	}
	return strings.Join(all, " ")
}

func set(t *testing.T, k *Keeper, after time.Duration, pool string, mode Mode, ttl time.Duration) {
	t.Helper()
	s := Switch{Target: Target{Pool: pool}, Mode: mode, Scope: Fleet}
	if err := k.Change(at(after), Change{Set: &s, TTL: ttl}); err != nil {
		t.Fatalf("set %s: %v", pool, err)
	}
}

func clearOne(t *testing.T, k *Keeper, after time.Duration, pool string) {
	t.Helper()
	if err := k.Change(at(after), Change{Clear: &Target{Pool: pool}}); err != nil {
		t.Fatalf("clear %s: %v", pool, err)
	}
}

// check compares what is in force on instances, at a time.
func check(t *testing.T, after time.Duration, want string, instances ...*Keeper) {
	t.Helper()
	for i, k := range instances {
		if got := modes(k.View(at(after))); got != want {
			t.Errorf("after %v, in force on instance %d: got %q, want %q", after, i, got, want)
		}
	}
}

func TestKeeper_Fleet(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	set(t, a, 0, "api", Dark, time.Minute)
	check(t, 0, "api=dark", a)
	check(t, 0, "", b)
	s.agree(t, a, 0)
	s.agree(t, b, 0)
	check(t, time.Second, "api=dark", a, b)

	set(t, b, 2*time.Second, "api", Off, time.Hour)
	set(t, a, 2*time.Second, "edge", Dark, time.Hour) // at once: one of them must try again
	s.agree(t, a, 3*time.Second)
	s.agree(t, b, 3*time.Second)
	s.agree(t, a, 3*time.Second)
	check(t, 3*time.Second, "api=off edge=dark", a, b)
	if s.state.Version != 3 {
		t.Errorf("three changes: got version %d, want 3", s.state.Version)
	}

	clearOne(t, a, 4*time.Second, "api")
	s.agree(t, a, 4*time.Second)
	s.agree(t, b, 4*time.Second)
	check(t, 4*time.Second, "edge=dark", a, b)
	check(t, 2*time.Second+time.Hour-1, "edge=dark", a, b)
	check(t, 2*time.Second+time.Hour, "", a, b)
}

// What is set while the store is away is in force here, and everywhere when it
// is back; what others have set meanwhile stays.
func TestKeeper_StoreIsAway(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	set(t, a, 0, "old", Dark, time.Hour)
	s.agree(t, a, 0)
	s.agree(t, b, 0)

	s.down = true
	set(t, a, time.Second, "mine", Off, time.Hour)
	set(t, b, 2*time.Second, "yours", Off, time.Hour)
	clearOne(t, b, 2*time.Second, "old")
	s.agree(t, a, 3*time.Second)
	s.agree(t, b, 3*time.Second)
	check(t, 3*time.Second, "mine=off old=dark", a)
	check(t, 3*time.Second, "yours=off", b)
	if a.Waiting() != 1 || b.Waiting() != 2 {
		t.Errorf("changes that wait: got %d and %d, want 1 and 2", a.Waiting(), b.Waiting())
	}

	s.down = false
	s.agree(t, b, 4*time.Second)
	s.agree(t, a, 4*time.Second)
	s.agree(t, b, 4*time.Second)
	check(t, 4*time.Second, "mine=off yours=off", a, b)
	if a.Waiting() != 0 || b.Waiting() != 0 {
		t.Errorf("changes that wait: got %d and %d, want none", a.Waiting(), b.Waiting())
	}
}

// A change that comes late does not undo what was changed since.
func TestKeeper_LateChange(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	set(t, a, 0, "api", Dark, time.Hour)
	clearOne(t, a, time.Second, "api") // waits, too
	set(t, b, 2*time.Second, "api", Off, time.Hour)
	s.agree(t, b, 2*time.Second)
	s.agree(t, a, 3*time.Second)
	s.agree(t, b, 3*time.Second)
	check(t, 3*time.Second, "api=off", a, b)
	if a.Waiting() != 0 {
		t.Errorf("changes that wait: got %d, want none", a.Waiting())
	}
}

// An empty store, and one that has an older version, has lost data: what is in
// force stays, and is written back by whoever knows most.
func TestKeeper_StoreLosesData(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	set(t, a, 0, "api", Dark, time.Hour)
	s.agree(t, a, 0)
	older := s.state
	set(t, a, time.Second, "api", Off, time.Hour)
	s.agree(t, a, time.Second)
	s.agree(t, b, time.Second)
	newest := s.state

	for _, left := range []State{{}, older} {
		s.state = left
		lost := s.agree(t, b, 2*time.Second)
		if diff := cmp.Diff(&Lost{Had: left.Version, Knows: 2}, lost); diff != "" {
			t.Errorf("version %d is left (-want +got):\n%s", left.Version, diff)
		}
		if lost := s.agree(t, a, 2*time.Second); lost != nil {
			t.Errorf("version %d was left, and written back: got %v, want nothing lost", left.Version, lost)
		}
		check(t, 2*time.Second, "api=off", a, b)
		if diff := cmp.Diff(newest, s.state); diff != "" {
			t.Errorf("written back (-want +got):\n%s", diff)
		}
	}
}

// Who knows an older version writes that back, and then whoever knows more.
func TestKeeper_WrittenBackTwice(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	set(t, a, 0, "api", Dark, time.Hour)
	s.agree(t, a, 0)
	s.agree(t, b, 0)
	set(t, a, time.Second, "api", Off, time.Hour)
	s.agree(t, a, time.Second)
	s.state = State{}
	s.agree(t, b, 2*time.Second)
	check(t, 2*time.Second, "api=dark", b)
	s.agree(t, a, 2*time.Second)
	s.agree(t, b, 2*time.Second)
	check(t, 2*time.Second, "api=off", a, b)
}

// A switch that a new instance sets in a store that has lost its data is kept,
// with all that the others know. One that was cleared does not come back with an
// old replica.
func TestKeeper_SetAfterALoss(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	for i := range 5 {
		set(t, a, time.Duration(i), fmt.Sprint("p", i), Dark, time.Hour)
	}
	s.agree(t, a, 0)
	replica := s.state
	clearOne(t, a, time.Second, "p4")
	s.agree(t, a, time.Second)

	s.state = State{}
	set(t, b, 2*time.Second, "new", Off, time.Hour)
	s.agree(t, b, 2*time.Second)
	s.agree(t, a, 3*time.Second)
	s.agree(t, b, 3*time.Second)
	check(t, 3*time.Second, "new=off p0=dark p1=dark p2=dark p3=dark", a, b)

	s.state = replica
	s.agree(t, a, 4*time.Second)
	check(t, 4*time.Second, "new=off p0=dark p1=dark p2=dark p3=dark", a)
}

// Two states of one version come from both sides of a failover. All agree on
// that which the store has.
func TestKeeper_OneVersionTwice(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	set(t, a, 0, "mine", Dark, time.Hour)
	s.agree(t, a, 0)
	s.state = State{} // the replica knew nothing
	set(t, b, 0, "yours", Dark, time.Hour)
	s.agree(t, b, 0)
	s.agree(t, a, 0)
	check(t, 0, "yours=dark", a, b)
}

func TestKeeper_Restart(t *testing.T) {
	s, a := new(store), new(Keeper)
	set(t, a, 0, "api", Dark, time.Hour)
	s.agree(t, a, 0)
	s.down = true
	set(t, a, time.Second, "edge", Off, time.Hour)
	local := Switch{Target: Target{Pool: "local"}, Mode: Dark, Scope: Instance}
	if err := a.Change(at(time.Second), Change{Set: &local, TTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	check(t, time.Second, "api=dark edge=off local=dark", a)

	again := new(Keeper)
	if err := again.Load(a.Save()); err != nil {
		t.Fatal(err)
	}
	check(t, 2*time.Second, "api=dark edge=off", again) // that of the instance is gone with it
	s.down = false
	s.agree(t, again, 3*time.Second)
	other := new(Keeper)
	s.agree(t, other, 3*time.Second)
	check(t, 3*time.Second, "api=dark edge=off", again, other)

	s.state = State{}
	cold := new(Keeper)
	if err := cold.Load(again.Save()); err != nil {
		t.Fatal(err)
	}
	s.agree(t, cold, 4*time.Second)
	s.agree(t, other, 4*time.Second)
	check(t, 4*time.Second, "api=dark edge=off", cold, other)
	for _, text := range []string{"", "{", "[]", `{"state":{"version":-1}}`} {
		if err := new(Keeper).Load([]byte(text)); err == nil {
			t.Errorf("Load(%q): no error", text)
		}
	}
}

func TestKeeper_Instance(t *testing.T) {
	s, k := new(store), new(Keeper)
	target := Target{Pool: "api"}
	if err := k.Change(epoch, Change{Set: &Switch{Target: target, Mode: Off, Scope: Instance}, TTL: time.Minute}); err != nil {
		t.Fatal(err)
	}
	set(t, k, 0, "api", Dark, time.Hour)
	s.agree(t, k, 0)
	v := k.View(epoch)
	if got := v.Mode("api", "rate", "rate"); got != Off {
		t.Errorf("off here, dark in the fleet: got %s, want the weaker, off", got)
	}
	if got := v.Mode("edge", "rate", "rate"); got != Enforce {
		t.Errorf("another pool: got %s, want enforce", got)
	}
	if len(s.state.Switches) != 1 {
		t.Errorf("in the store: got %v, want the one of the fleet", s.state.Switches)
	}
	if got, want := v.Ends(), at(time.Minute); !got.Equal(want) {
		t.Errorf("the first ends at %v, want %v", got, want)
	}

	next := new(Keeper)
	next.TakeOver(k.Local())
	check(t, 0, "api=off", next)
	check(t, time.Minute, "", next)
	if err := k.ClearLocal(epoch, Change{Clear: &target}); err != nil {
		t.Errorf("clear: %v", err)
	}
	check(t, 0, "api=dark", k)
	if err := k.ClearLocal(epoch, Change{Clear: &target}); !IsNothing(err) {
		t.Errorf("clear it again: got %v, want nothing", err)
	}
}

// What cannot be is refused, and changes nothing.
func TestKeeper_Refuses(t *testing.T) {
	k := new(Keeper)
	for i := range MaxSwitches {
		set(t, k, 0, fmt.Sprint("p", i), Dark, time.Minute)
		new(store).agree(t, k, 0)
	}
	one := Switch{Target: Target{Pool: "more"}, Mode: Dark, Scope: Fleet}
	if err := k.Change(epoch, Change{Set: &one, TTL: time.Hour}); err == nil || !strings.Contains(err.Error(), "1000 are set already") {
		t.Errorf("one switch too many: got %v", err)
	}
	set(t, k, 0, "p7", Off, time.Minute) // in place of another
	if err := k.Change(at(time.Minute), Change{Set: &one, TTL: time.Hour}); err != nil {
		t.Errorf("when they have ended: %v", err)
	}

	k = new(Keeper)
	for i, change := range []Change{
		{Clear: &Target{Pool: "api"}}, {ClearAll: true}, {Drop: &Dropped{Target{"api", "rate", "rate"}, alice}},
	} {
		if err := k.Change(epoch, change); !IsNothing(err) {
			t.Errorf("clear %d of what is not set: got %v, want nothing", i, err)
		}
	}
	if err := k.Change(epoch, Change{Set: &one}); err == nil || IsNothing(err) {
		t.Errorf("a switch without end: got %v", err)
	}
	if k.Waiting() != 0 {
		t.Errorf("changes that wait: got %d, want none", k.Waiting())
	}
	for i := range maxPending {
		set(t, k, time.Duration(i), "api", Dark, time.Hour)
	}
	if err := k.Change(at(time.Second), Change{Set: &one, TTL: time.Hour}); err == nil || !strings.Contains(err.Error(), "wait for the store") {
		t.Errorf("a change too many that waits: got %v", err)
	}
}

// Each change is told once, and what is remembered of the identities that it is
// about is forgotten.
func TestView_Since(t *testing.T) {
	s, a, b := new(store), new(Keeper), new(Keeper)
	seen := map[*Keeper]*View{a: new(View), b: new(View)}
	look := func(k *Keeper, after time.Duration) (events, stale string) {
		old, v := seen[k], k.View(at(after))
		seen[k] = v
		var all []string
		for _, e := range v.Since(old, at(after)) {
			if e.Switch != nil {
				all = append(all, "switch "+string(e.Action)+" "+e.Switch.Mode.String())
			} else {
				all = append(all, fmt.Sprint("override ", e.Action, " ", e.Override.Requests))
			}
		}
		ids, _ := v.Stale(old, at(after))
		return strings.Join(all, ", "), strings.Join(ids, " ")
	}
	o := func(n int64) *Override {
		return &Override{Target: Target{"api", "rate", "rate"}, Identity: alice, Requests: n, Burst: n}
	}
	rows := []struct {
		after         time.Duration
		change        Change
		events, stale string
	}{
		{1, Change{Set: &Switch{Target: Target{Pool: "api"}, Mode: Dark, Scope: Fleet}, TTL: time.Minute}, "switch set dark", ""},
		{time.Second, Change{Set: &Switch{Target: Target{Pool: "api"}, Mode: Off, Scope: Fleet}, TTL: time.Minute}, "switch set off", ""},
		{2 * time.Second, Change{Override: o(5), TTL: 10 * time.Second}, "override set 5", alice},
		{3 * time.Second, Change{Override: o(7), TTL: 10 * time.Second}, "override set 7", alice},
		{4 * time.Second, Change{Drop: &Dropped{o(7).Target, alice}}, "override cleared 7", alice},
		{5 * time.Second, Change{Reset: alice}, "", alice},
		{6 * time.Second, Change{Reset: alice}, "", alice},
		{7 * time.Second, Change{Override: o(9), TTL: 2 * time.Second}, "override set 9", alice},
		{9 * time.Second, Change{}, "override expired 9", alice},
		{61 * time.Second, Change{}, "switch expired off", ""},
	}
	for _, row := range rows {
		if row.change != (Change{}) {
			if err := a.Change(at(row.after), row.change); err != nil {
				t.Fatalf("after %v: %v", row.after, err)
			}
		}
		for i, k := range []*Keeper{a, b} {
			if i == 1 {
				s.agree(t, a, row.after)
				s.agree(t, b, row.after)
			}
			if events, stale := look(k, row.after); events != row.events || stale != row.stale {
				t.Errorf("after %v, instance %d: got %q and stale %q, want %q and %q", row.after, i, events, stale, row.events, row.stale)
			}
			if events, stale := look(k, row.after); events != "" || stale != "" {
				t.Errorf("after %v, instance %d, once more: got %q and stale %q, want nothing", row.after, i, events, stale)
			}
		}
	}
	for range maxResets + 1 {
		if err := a.Change(at(62*time.Second), Change{Reset: alice}); err != nil {
			t.Fatal(err)
		}
		s.agree(t, a, 62*time.Second)
	}
	s.agree(t, b, 62*time.Second)
	if _, all := b.View(at(62*time.Second)).Stale(seen[b], at(62*time.Second)); !all {
		t.Error("more resets than are kept: want everything to be forgotten")
	}
}
