// SPDX-License-Identifier: Apache-2.0

package control

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// epoch is when tests begin.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

const alice = "00112233445566778899aabbccddeeff"

func at(after time.Duration) time.Time { return epoch.Add(after) }

// lasting is a note of something that is set at epoch.
func lasting(ttl time.Duration) Note { return Note{Since: epoch, Until: at(ttl), Reason: "test"} }

func aSwitch(target Target, mode Mode, ttl time.Duration) Switch {
	return Switch{Target: target, Mode: mode, Scope: Fleet, Note: lasting(ttl)}
}

func anOverride(identity string, requests int64, ttl time.Duration) Override {
	return Override{Target: Target{"api", "rate", "rate"}, Identity: identity, Requests: requests, Burst: requests, Note: lasting(ttl)}
}

func TestMode(t *testing.T) {
	cases := []struct {
		text     string
		mode     Mode
		strength float64
		word     string
	}{
		{"off", Off, 0, "off"},
		{"dark", Dark, 1, "dark"},
		{"enforce 1", EnforcePercent(1), 1.01, "enforce"},
		{"enforce 25", EnforcePercent(25), 1.25, "enforce"},
		{"enforce", Enforce, 2, "enforce"},
	}
	weaker := -1
	for _, c := range cases {
		got, err := ParseMode(c.text)
		if err != nil || got != c.mode {
			t.Errorf("ParseMode(%q): got %v, %v; want %v", c.text, got, err, c.mode)
		}
		if got := c.mode.String(); got != c.text {
			t.Errorf("%d.String(): got %q, want %q", c.mode, got, c.text)
		}
		if c.mode.Strength() != c.strength || c.mode.Word() != c.word {
			t.Errorf("%s: got strength %v and word %s, want %v and %s", c.text, c.mode.Strength(), c.mode.Word(), c.strength, c.word)
		}
		if int(c.mode) <= weaker {
			t.Errorf("%s is not stronger than the one before", c.text)
		}
		weaker = int(c.mode)
	}
	if got, err := ParseMode("enforce 0%"); got != Dark || err != nil {
		t.Errorf("enforce 0%%: got %v, %v; want dark: it is the same", got, err)
	}
	for _, text := range []string{"", "on", "enforce 101", "enforce -1", "enforce x", "dark 20", "enforce 20 30"} {
		if got, err := ParseMode(text); err == nil {
			t.Errorf("ParseMode(%q): got %v, want an error", text, got)
		}
	}
}

func TestTarget_Covers(t *testing.T) {
	cases := []struct {
		target Target
		want   bool
	}{
		{Target{}, true},
		{Target{Pool: "api"}, true},
		{Target{Kind: "rate"}, true},
		{Target{"api", "rate", ""}, true},
		{Target{"api", "rate", "burst"}, true},
		{Target{"", "rate", "burst"}, true},
		{Target{Pool: "edge"}, false},
		{Target{Kind: "fleet"}, false},
		{Target{"api", "rate", "other"}, false},
		{Target{"api", "concurrency", "burst"}, false},
	}
	for _, c := range cases {
		if got := c.target.Covers("api", "rate", "burst"); got != c.want {
			t.Errorf("%s covers api/rate/burst: got %v, want %v", c.target, got, c.want)
		}
	}
}

func TestSwitch_Validate(t *testing.T) {
	cases := []struct {
		name string
		edit func(*Switch)
		want string // in the error
	}{
		{"one that strengthens", func(s *Switch) { s.Mode = Enforce }, "can only weaken"},
		{"no scope", func(s *Switch) { s.Scope = "" }, "scope ''"},
		{"an unknown kind", func(s *Switch) { s.Kind = "rates" }, "kind 'rates' is not rate, concurrency, fleet, workers"},
		{"a limit of no kind", func(s *Switch) { s.Limit = "burst" }, "without a kind"},
		{"a long name", func(s *Switch) { s.Pool = strings.Repeat("x", 33) }, "more than 32"},
		{"a name for a terminal", func(s *Switch) { s.Pool = "a\x1b[2J" }, "characters that no name"},
		{"a long reason", func(s *Switch) { s.Reason = strings.Repeat("ä", 201) }, "more than 200"},
		{"a long actor", func(s *Switch) { s.Actor = strings.Repeat("x", 101) }, "more than 100"},
		{"two lines", func(s *Switch) { s.Reason = "a\nb" }, "one line"},
		{"letters that change their direction", func(s *Switch) { s.Reason = "a\u202eb" }, "one line"},
		{"no text", func(s *Switch) { s.Reason = "a\xff" }, "one line"},
		{"no end", func(s *Switch) { s.Until = time.Time{} }, "ends by itself"},
		{"an end too soon", func(s *Switch) { s.Until = s.Since.Add(time.Millisecond) }, "ends by itself"},
		{"an end too late", func(s *Switch) { s.Until = s.Since.Add(MaxTTL + 1) }, "ends by itself"},
	}
	good := aSwitch(Target{Pool: "api"}, Dark, time.Hour)
	good.Reason, good.Actor = strings.Repeat("ä", 200), strings.Repeat("x", 100)
	if err := good.Validate(); err != nil {
		t.Errorf("a good one: %v", err)
	}
	for _, c := range cases {
		s := good
		c.edit(&s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", c.name, err, c.want)
		}
	}
}

func TestOverride_Validate(t *testing.T) {
	cases := []struct {
		name string
		edit func(*Override)
		want string
	}{
		{"every pool", func(o *Override) { o.Pool = "" }, "for one limit"},
		{"every limit", func(o *Override) { o.Limit = "" }, "for one limit"},
		{"a shedder", func(o *Override) { o.Kind = "fleet" }, "not rate or concurrency"},
		{"no burst", func(o *Override) { o.Burst = 0 }, "needs requests and burst"},
		{"less than nothing", func(o *Override) { o.Requests = -1 }, "needs requests and burst"},
		{"a capacity, too", func(o *Override) { o.Capacity = 1 }, "nothing else"},
		{"concurrency without capacity", func(o *Override) { o.Kind, o.Requests, o.Burst = "concurrency", 0, 0 }, "needs a capacity"},
		{"a key for an identity", func(o *Override) { o.Identity = "sk_live_1" }, "32 hexadecimal"},
		{"capitals", func(o *Override) { o.Identity = strings.ToUpper(alice) }, "32 hexadecimal"},
		{"no end", func(o *Override) { o.Until = time.Time{} }, "ends by itself"},
	}
	for _, c := range cases {
		o := anOverride(alice, 5, time.Hour)
		if err := o.Validate(); err != nil {
			t.Fatalf("a good one: %v", err)
		}
		c.edit(&o)
		err := o.Validate()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", c.name, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "sk_live") {
			t.Errorf("%s: the error shows a key: %v", c.name, err)
		}
	}
}

// What a store holds that nobody could have set is left out.
func TestDecode(t *testing.T) {
	good := State{
		Version: 3, Tag: "t", At: epoch,
		Switches:  []Switch{aSwitch(Target{Pool: "api"}, Dark, time.Hour)},
		Overrides: []Override{anOverride(alice, 5, time.Hour)},
		Resets:    []Reset{{epoch, alice}},
	}
	got, err := Decode(good.Encode())
	if diff := cmp.Diff(good, got); diff != "" || err != nil {
		t.Errorf("there and back (-want +got), %v:\n%s", err, diff)
	}
	bad := good
	local := good.Switches[0]
	local.Scope = Instance
	strong := good.Switches[0]
	strong.Mode = Enforce
	bad.Switches = append(bad.Switches, local, strong)
	bad.Overrides = append(bad.Overrides, Override{})
	got, err = Decode(bad.Encode())
	if diff := cmp.Diff(good, got); diff != "" || err != nil {
		t.Errorf("with what nobody can set (-want +got), %v:\n%s", err, diff)
	}
	for _, text := range []string{"{", "[]", `{"version":-1}`, `{"switches":[{"mode":"on"}]}`} {
		if got, err := Decode(text); err == nil {
			t.Errorf("Decode(%s): got %v, want an error", text, got)
		}
	}
	if got, err := Decode(""); err != nil || got.ID() != "" {
		t.Errorf("nothing: got %v, %v; want no state", got, err)
	}
}
