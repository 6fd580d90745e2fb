// SPDX-License-Identifier: Apache-2.0

// Package control holds what operators change while a fleet runs: switches,
// which weaken how limits are applied, and overrides, which give one identity
// other numbers. Both end by themselves, and say who set them and why.
//
// All of it that concerns the fleet is one State with one version. Whoever
// changes it compares and swaps it in the store that the fleet shares; every
// instance asks for what it does not know yet, keeps what it has while the store
// is away, and writes it back if the store has lost it. It trades speed of change
// for that simplicity: a state is small (see MaxSwitches, MaxOverrides) and
// changes a few times a day.
//
// It knows no store, no clock and no HTTP: time is an argument, and for the fleet
// it is the store's.
package control

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Bounds of what can be set. A full state is some hundred kilobytes, which a
// thousand instances read when it changes.
const (
	MaxSwitches  = 1000
	MaxOverrides = 1000
	MaxReason    = 200 // characters
	MaxActor     = 100 // characters

	// Nothing is in force for ever: what nobody remembers to clear must end.
	MinTTL = time.Second
	MaxTTL = 366 * 24 * time.Hour

	maxResets  = 100
	maxPending = 100
	maxName    = 32
)

// Mode is how a limit is applied. Modes are ordered: of several, the weakest is
// in force, which is their minimum.
type Mode uint8

// The modes. Between Dark and Enforce are those that are enforced for a
// percentage of the identities; see Percent.
const (
	Off     Mode = 0   // not asked
	Dark    Mode = 1   // decides and counts, rejects nothing
	Enforce Mode = 101 // rejects
)

// EnforcePercent is the mode that enforces for a percentage of the identities, 0
// to 100, and is dark for the others.
func EnforcePercent(percent int) Mode { return Dark + Mode(min(max(percent, 0), 100)) }

// Percent is the percentage of the identities that the mode is enforced for.
func (m Mode) Percent() int { return int(max(m, Dark) - Dark) }

// Strength is the mode as metrics show it: 0 off, 1 dark, 2 enforced, 1.25
// enforced for a quarter.
func (m Mode) Strength() float64 {
	if m == Off {
		return 0
	}
	return 1 + float64(m.Percent())/100
}

// Word is the mode in one word of a fixed set: off, dark or enforce.
func (m Mode) Word() string {
	switch m {
	case Off:
		return "off"
	case Dark:
		return "dark"
	}
	return "enforce"
}

// String returns the mode as ParseMode reads it: off, dark, enforce 25, enforce.
func (m Mode) String() string {
	if m <= Dark || m >= Enforce {
		return m.Word()
	}
	return "enforce " + strconv.Itoa(m.Percent())
}

// ParseMode reads off, dark, enforce or enforce with a percentage.
func ParseMode(text string) (Mode, error) {
	words := strings.Fields(text)
	switch {
	case len(words) == 1 && words[0] == "off":
		return Off, nil
	case len(words) == 1 && words[0] == "dark":
		return Dark, nil
	case len(words) == 1 && words[0] == "enforce":
		return Enforce, nil
	case len(words) == 2 && words[0] == "enforce":
		percent, err := strconv.Atoi(strings.TrimSuffix(words[1], "%"))
		if err != nil || percent < 0 || percent > 100 {
			return 0, fmt.Errorf("mode '%s' has no percentage between 0 and 100", text)
		}
		return EnforcePercent(percent), nil
	}
	return 0, fmt.Errorf("mode '%s' is not off, dark or enforce <percent>", text)
}

// MarshalText implements encoding.TextMarshaler.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *Mode) UnmarshalText(text []byte) (err error) {
	*m, err = ParseMode(string(text))
	return err
}

// Scope is whom a switch concerns.
type Scope string

// The scopes.
const (
	Instance Scope = "instance" // this process, while it lives
	Fleet    Scope = "fleet"    // every instance that shares the store
)

// Kinds are the kinds of limiters and shedders.
var Kinds = []string{"rate", "concurrency", "fleet", "workers"}

// Target names what a switch or an override is about. What is empty stands for
// all: all pools, all kinds of a pool, all limits of a kind.
type Target struct {
	Pool  string `json:"pool,omitempty"`
	Kind  string `json:"kind,omitempty"`
	Limit string `json:"limit,omitempty"`
}

// Covers reports whether t stands for a limit, or a shedder (whose limit has the
// name of its kind).
func (t Target) Covers(pool, kind, limit string) bool {
	return (t.Pool == "" || t.Pool == pool) && (t.Kind == "" || t.Kind == kind) &&
		(t.Limit == "" || t.Limit == limit)
}

// String returns the target as people read it: "api/rate/burst", "api/rate",
// "*/workers", "*".
func (t Target) String() string {
	text := cmp.Or(t.Pool, "*")
	if t.Kind != "" {
		text += "/" + t.Kind
	}
	if t.Limit != "" {
		text += "/" + t.Limit
	}
	return text
}

func (t Target) validate() error {
	switch {
	case len(t.Pool) > maxName || len(t.Limit) > maxName:
		return fmt.Errorf("a name has more than %d characters", maxName)
	case !plain(t.Pool) || !plain(t.Limit):
		return errors.New("a name has characters that no name can have")
	case t.Kind == "" && t.Limit != "":
		return fmt.Errorf("limit '%s' without a kind; say whether it is a limit of rate or concurrency", t.Limit)
	}
	if t.Kind == "" || slices.Contains(Kinds, t.Kind) {
		return nil
	}
	return fmt.Errorf("kind '%s' is not %s", t.Kind, strings.Join(Kinds, ", "))
}

// Note says who has set something, why, and when it ends.
type Note struct {
	Since  time.Time `json:"since"`
	Until  time.Time `json:"until"`
	Reason string    `json:"reason,omitempty"`
	Actor  string    `json:"actor,omitempty"`
}

// InForce reports whether it has not ended at now.
func (n Note) InForce(now time.Time) bool { return now.Before(n.Until) }

func (n Note) validate() error {
	switch ttl := n.Until.Sub(n.Since); {
	case utf8.RuneCountInString(n.Reason) > MaxReason:
		return fmt.Errorf("the reason has more than %d characters", MaxReason)
	case utf8.RuneCountInString(n.Actor) > MaxActor:
		return fmt.Errorf("the actor has more than %d characters", MaxActor)
	case !plain(n.Reason) || !plain(n.Actor):
		return errors.New("reason and actor are one line of text")
	case ttl < MinTTL || ttl > MaxTTL:
		return fmt.Errorf("a ttl of %s is not between %s and %s; everything ends by itself", ttl, MinTTL, MaxTTL)
	}
	return nil
}

// plain reports whether text is valid and without control characters, which
// would let it pass for something else in a terminal or a log.
func plain(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool {
		return unicode.IsControl(r) || unicode.Is(unicode.Cf, r)
	})
}

// Switch weakens how limits are applied. There is one for each target and scope.
type Switch struct {
	Target
	Mode  Mode  `json:"mode"`
	Scope Scope `json:"scope"`
	Note
}

// Validate returns the first mistake.
func (s *Switch) Validate() error {
	switch {
	case s.Scope != Instance && s.Scope != Fleet:
		return fmt.Errorf("scope '%s' is not instance or fleet", s.Scope)
	case s.Mode >= Enforce:
		return errors.New("a switch can only weaken: mode off, dark or enforce with less than 100 percent; clear a switch to go back to the config")
	}
	return cmp.Or(s.Target.validate(), s.Note.validate())
}

// Override gives one identity other numbers in one limit. The period and the
// lease stay those of the limit, so the identity keeps its bucket and leases.
type Override struct {
	Target
	Identity string `json:"identity"` // 32 hexadecimal digits

	// Of rate: requests in the limit's own period, and what a full bucket holds.
	Requests int64 `json:"requests,omitempty"`
	Burst    int64 `json:"burst,omitempty"`

	// Of concurrency.
	Capacity int64 `json:"capacity,omitempty"`

	Note
}

// Validate returns the first mistake. Whether the limit can have such numbers is
// known to those who know the limit.
func (o *Override) Validate() error {
	rate, concurrency := o.Requests != 0 || o.Burst != 0, o.Capacity != 0
	switch {
	case o.Pool == "" || o.Limit == "":
		return errors.New("an override is for one limit; name its pool, kind and limit")
	case o.Kind != "rate" && o.Kind != "concurrency":
		return fmt.Errorf("kind '%s' is not rate or concurrency, which alone are per identity", o.Kind)
	case o.Kind == "rate" && (concurrency || o.Requests < 1 || o.Burst < 1):
		return errors.New("an override of a rate needs requests and burst, both at least 1, and nothing else")
	case o.Kind == "concurrency" && (rate || o.Capacity < 1):
		return errors.New("an override of a concurrency limit needs a capacity of at least 1, and nothing else")
	}
	if raw, err := hex.DecodeString(o.Identity); err != nil || len(raw) != 16 || strings.ToLower(o.Identity) != o.Identity {
		return errors.New("an identity is 32 hexadecimal digits, as logs show them")
	}
	return cmp.Or(o.Target.validate(), o.Note.validate())
}

// key is what there is one override of.
type overrideKey struct {
	Target
	identity string
}

func (o *Override) key() overrideKey { return overrideKey{o.Target, o.Identity} }
