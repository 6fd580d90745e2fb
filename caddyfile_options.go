// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// An option reads what follows the word that the dispenser is on. What it
// leaves over is a mistake of the user's.
type option func(*caddyfile.Dispenser) error

// options are the words that may follow a word or stand in its block.
type options map[string]option

// String lists the words for messages.
func (o options) String() string {
	return strings.Join(slices.Sorted(maps.Keys(o)), ", ")
}

// read reads all that follows the word that d is on, and returns the arguments
// that come before any option. Options stand one a line in a block and, if
// inline, on d's line as well. Only rate and concurrency repeat.
func (o options) read(d *caddyfile.Dispenser, inline bool) (args []string, err error) {
	parent := d.Val()
	var given []caddyfile.Segment
	for d.NextArg() {
		_, isOption := o[d.Val()]
		switch last := len(given) - 1; {
		case isOption && !inline:
			return nil, d.Errf("'%s' is an option of '%s'; write it in a block, on a line of its own", d.Val(), parent)
		case isOption:
			given = append(given, caddyfile.Segment{d.Token()})
		case last >= 0:
			given[last] = append(given[last], d.Token())
		default:
			args = append(args, d.Val())
		}
	}
	for d.NextBlock(0) {
		given = append(given, d.NextSegment())
	}

	seen := make(map[string]bool)
	for _, segment := range given {
		d := caddyfile.NewDispenser(segment)
		d.Next()
		name := d.Val()
		read, ok := o[name]
		switch {
		case !ok:
			return nil, d.Errf("unknown option '%s' of '%s'; its options are %s", name, parent, o)
		case seen[name] && name != "rate" && name != "concurrency":
			return nil, d.Errf("'%s' is given twice in one '%s'", name, parent)
		}
		seen[name] = true
		if err := read(d); err != nil {
			return nil, err
		}
		if !d.Next() {
			continue
		}
		_, isOption := o[d.Val()]
		switch {
		case isOption:
			return nil, d.Errf("unexpected '%s' after '%s'; in a block every option has a line of its own", d.Val(), name)
		case inline:
			return nil, d.Errf("unexpected '%s' after '%s'; options of '%s' are %s", d.Val(), name, parent, o)
		default:
			return nil, d.Errf("unexpected '%s' after '%s'", d.Val(), name)
		}
	}
	return args, nil
}

// atStart adds to err the file and line where d starts.
func atStart(d *caddyfile.Dispenser, err error) error {
	if err == nil {
		return nil
	}
	d.Reset()
	d.Next()
	return d.WrapErr(err)
}

// readFlag is an option that says all by being there.
func readFlag(to *bool) option {
	return func(*caddyfile.Dispenser) error {
		*to = true
		return nil
	}
}

// readText takes exactly one argument for each target. It never quotes them: they
// may be secrets.
func readText(to ...*string) option {
	return func(d *caddyfile.Dispenser) error {
		name, args := d.Val(), d.RemainingArgs()
		switch {
		case len(args) < len(to) || slices.Contains(args, ""):
			return d.Errf("'%s' lacks a value; from {$VAR} there is none where VAR is not set", name)
		case len(args) > len(to):
			return d.Errf("'%s' has too many values; quote one that contains spaces", name)
		}
		for i, arg := range args {
			*to[i] = arg
		}
		return nil
	}
}

// readWord takes one of a few words.
func readWord(to *string, words []string) option {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		if !d.NextArg() || !slices.Contains(words, d.Val()) {
			return d.Errf("'%s' is %s", name, alternatives(words))
		}
		*to = d.Val()
		return nil
	}
}

func readOnOff(to **bool) option {
	return func(d *caddyfile.Dispenser) error {
		var s string
		err := readWord(&s, []string{"on", "off"})(d)
		*to = new(s == "on")
		return err
	}
}

// readNumber takes a whole number from low to high.
func readNumber[T int | int64](to *T, low, high T) option {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		if d.NextArg() {
			n, err := strconv.ParseInt(d.Val(), 10, 64)
			if err == nil && n >= int64(low) && n <= int64(high) {
				*to = T(n)
				return nil
			}
		}
		if int64(high) >= math.MaxInt32 {
			return d.Errf("'%s' takes a whole number of at least %d", name, low)
		}
		return d.Errf("'%s' takes a whole number from %d to %d", name, low, high)
	}
}

func readDuration(to *caddy.Duration) option {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		if d.NextArg() {
			if v, err := caddy.ParseDuration(d.Val()); err == nil && v > 0 {
				*to = caddy.Duration(v)
				return nil
			}
		}
		return d.Errf("'%s' takes a duration above zero, such as 50ms or 10s", name)
	}
}

// readKey takes the sources of an identity.
func readKey(to *[]string) option {
	return func(d *caddyfile.Dispenser) error {
		sources, err := parseSources(d.RemainingArgs())
		if err != nil {
			return d.WrapErr(err)
		}
		for _, source := range sources {
			*to = append(*to, source.word)
		}
		if len(*to) == 0 {
			return d.Err("'key' needs a source: api_key, client_ip or a text with placeholders")
		}
		return nil
	}
}

// readMode takes off, dark, enforce or enforce with a percentage.
func readMode(to **Mode) option {
	return func(d *caddyfile.Dispenser) error {
		if !d.NextArg() {
			return d.Err("'mode' is off, dark or enforce [<percent>]")
		}
		m := &Mode{State: d.Val()}
		*to = m
		if err := m.validate(); err != nil {
			return d.WrapErr(err)
		}
		if d.NextArg() {
			if m.State != "enforce" {
				return d.Errf("unexpected '%s' after mode %s; only enforce takes a percentage", d.Val(), m.State)
			}
			percent, err := parsePercent(d.Val())
			if err != nil {
				return d.WrapErr(err)
			}
			m.Percent = &percent
		}
		return nil
	}
}

func parsePercent(s string) (int, error) {
	digits := strings.TrimSuffix(s, "%")
	if n, err := strconv.Atoi(digits); err == nil && n >= 0 && n <= 100 {
		return n, nil
	}
	if f, err := strconv.ParseFloat(digits, 64); err == nil && f > 0 && f < 1 && digits == s {
		return 0, fmt.Errorf("'%s' is less than one percent; write %.4g%%", s, f*100)
	}
	return 0, fmt.Errorf("'%s' is not a whole percentage from 0 to 100, such as 20%%", s)
}

// parseRate parses <n>/<unit>.
func parseRate(s string) (int64, caddy.Duration, error) {
	count, unit, ok := strings.Cut(s, "/")
	if !ok {
		return 0, 0, fmt.Errorf("rate '%s' has no unit; write %s/s, or /m, /h, /d or a duration, such as /10s", s, s)
	}
	n, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("rate '%s' does not start with a whole number; for less than one in a unit take a longer one, such as 30/m", s)
	}
	if len(unit) == 1 && strings.Contains("smhd", unit) {
		unit = "1" + unit
	}
	per, err := caddy.ParseDuration(unit)
	if err != nil || per <= 0 {
		return 0, 0, fmt.Errorf("rate '%s' has a unit that is not s, m, h, d or a duration, such as 10s", s)
	}
	return n, caddy.Duration(per), nil
}

// readMatchers takes either a list of matchers or a block of one.
func readMatchers(helper httpcaddyfile.Helper, to *caddyhttp.RawMatcherSets) option {
	return func(d *caddyfile.Dispenser) error {
		if d.CountRemainingArgs() > 0 {
			return readMatcherList(helper, to)(d)
		}
		name, empty := d.Val(), true
		look := d.NewFromNextSegment()
		look.Next()
		for ; look.NextBlock(0); look.NextSegment() {
			empty = false
			matcher := look.Val()
			if strings.HasPrefix(matcher, "@") {
				return look.Errf("'%s' cannot stand in the block of '%s'; write %s %s on one line", matcher, name, name, matcher)
			}
			if _, err := caddy.GetModule("http.matchers." + matcher); err != nil && !look.Token().Quoted() {
				return look.Errf("'%s' in the block of '%s' is no matcher, such as path, method or header", matcher, name)
			}
		}
		if empty {
			return atStart(d, fmt.Errorf("'%s' needs matchers: @names, /paths or a block", name))
		}
		d.Reset()
		d.Next()
		set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(d)
		if err != nil {
			return err
		}
		if matcher := matchesNothing(set); matcher != "" {
			return atStart(d, fmt.Errorf("'%s' in the block of '%s' has no arguments, so it matches no request", matcher, name))
		}
		*to = append(*to, set)
		return nil
	}
}

// matchesNothing returns the name of a matcher that was given no arguments: a
// nil list or map, where Caddy's matchers need one.
func matchesNothing(set caddy.ModuleMap) string {
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if string(set[name]) == "null" {
			return name
		}
	}
	return ""
}

// readMatcherList takes one or more named matchers and paths, of which any may
// match.
func readMatcherList(helper httpcaddyfile.Helper, to *caddyhttp.RawMatcherSets) option {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		for d.CountRemainingArgs() > 0 {
			set, ok, err := helper.WithDispenser(d).MatcherToken()
			switch {
			case err != nil:
				return d.Errf("%v; it is defined neither in this site nor in a block around '%s'", err, name)
			case !ok:
				return d.Errf("'%s' is no matcher; '%s' takes @names and /paths", d.Val(), name)
			case len(set) == 0:
				return d.Errf("'%s' in '%s' matches every request; name some, or leave '%s' out", d.Val(), name, name)
			case matchesNothing(set) != "":
				return d.Errf("'%s' in '%s' matches no request: its '%s' has no arguments", d.Val(), name, matchesNothing(set))
			}
			*to = append(*to, set)
		}
		if len(*to) == 0 {
			return d.Errf("'%s' needs @names or /paths of matchers", name)
		}
		if d.NextBlock(0) {
			return atStart(d, fmt.Errorf("'%s' takes matchers on its line or in a block, not both", name))
		}
		return nil
	}
}
