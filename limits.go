// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
)

// burstSeconds is how many seconds of its rate a bucket of n/s holds unless
// burst says otherwise: the 500 tokens at 100/s of Stripe's post.
const burstSeconds = 5

// The words that options take. The first is the default.
var (
	modeWords        = []string{"enforce", "dark", "off"}
	shouldRetryWords = []string{"omit", "auto"}
	storeErrorWords  = []string{"open", onStoreErrorLocal, onStoreErrorClosed}
	rejectWords      = []string{"json", "error"}
)

// What on_store_error does besides nothing.
const (
	onStoreErrorLocal  = "local"
	onStoreErrorClosed = "closed"
)

// optionWords are no names: a name that is left out before one of them, or an
// option whose value is left out, would silently read as a name.
var optionWords = []string{
	"key", "exempt", "critical", "test_mode", "rate", "concurrency", "fleet", "workers",
	"mode", "on_store_error", "ratelimit_headers", "should_retry", "doc_url", "reject",
	"ipv6_prefix", "burst", "cost", "match", "lease", "reserve", "good", "bad", "grace",
	"ramp", "utilization", "off", "dark", "enforce", "auto",
}

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,31}$`)

// validateName checks the name of a pool or limit. The option word except is
// allowed all the same: the default name of a limit is that of its kind.
func validateName(what, name, except string) error {
	if !nameRE.MatchString(name) {
		return fmt.Errorf("%s name '%s' is not a lower-case letter followed by at most 31 of a-z, 0-9, _ and -", what, name)
	}
	if name != except && slices.Contains(optionWords, name) {
		return fmt.Errorf("%s name '%s' is an option; choose another name", what, name)
	}
	return nil
}

// validateKey checks the sources of an identity.
func validateKey(words []string) error {
	_, err := parseSources(words)
	return err
}

// validate checks the mode; a nil Mode is the default and valid.
func (m *Mode) validate() error {
	if m == nil {
		return nil
	}
	switch {
	case !slices.Contains(modeWords, m.State):
		return fmt.Errorf("mode '%s' is not off, dark or enforce", m.State)
	case m.Percent != nil && m.State != "enforce":
		return fmt.Errorf("mode %s takes no percentage; only enforce does", m.State)
	case m.Percent != nil && (*m.Percent < 0 || *m.Percent > 100):
		return fmt.Errorf("mode enforce %d is not between 0 and 100 percent", *m.Percent)
	}
	return nil
}

// limit returns the limit with its defaults filled in, or the first mistake in
// its configuration.
func (rl *RateLimit) limit(pool string) (*limiters.Limit, error) {
	name := cmp.Or(rl.Name, "rate")
	per := cmp.Or(time.Duration(rl.Per), time.Second)
	burst := rl.Burst
	if burst == 0 {
		burst = rl.Requests
		if per <= time.Second {
			// Capped only so that it cannot overflow: NewRate refuses the rest.
			burst = burstSeconds * min(rl.Requests, limiters.MaxRequestsPerSecond)
		}
	}
	if err := cmp.Or(validateName("limit", name, "rate"), validateKey(rl.Key), rl.Mode.validate()); err != nil {
		return nil, err
	}
	return limiters.NewRate(pool, name, rl.Requests, per, burst, cmp.Or(rl.Cost, 1))
}

// limit returns the limit with its defaults filled in, or the first mistake in
// its configuration.
func (cl *ConcurrencyLimit) limit(pool string) (*limiters.Limit, error) {
	name := cmp.Or(cl.Name, "concurrency")
	if err := cmp.Or(validateName("limit", name, "concurrency"), validateKey(cl.Key), cl.Mode.validate()); err != nil {
		return nil, err
	}
	return limiters.NewConcurrency(pool, name, cl.Capacity, cmp.Or(time.Duration(cl.Lease), limiters.DefaultLease))
}

// validateLimits checks that there are limits, that each is valid and that the
// names are unique in their kind.
func (h *Handler) validateLimits() error {
	if len(h.Rate)+len(h.Concurrency) == 0 && h.Fleet == nil && h.Workers == nil {
		return errors.New("stripe_ratelimit without any limit; add rate, concurrency, fleet or workers")
	}
	names := make(map[string]bool)
	add := func(l *limiters.Limit, err error) error {
		if err != nil {
			return err
		}
		id := l.Kind.String() + " " + l.Name
		if names[id] {
			return fmt.Errorf("a second %s limit is named '%s'; give it a name of its own", l.Kind, l.Name)
		}
		names[id] = true
		return nil
	}
	for _, rl := range h.Rate {
		if err := add(rl.limit(h.Pool)); err != nil {
			return err
		}
	}
	for _, cl := range h.Concurrency {
		if err := add(cl.limit(h.Pool)); err != nil {
			return err
		}
	}
	return nil
}

// validateConfig reports the first mistake in what the configuration says by
// itself, before placeholders are replaced and matchers loaded.
func (h *Handler) validateConfig() error {
	if h.Pool != "" {
		if err := validateName("pool", h.Pool, ""); err != nil {
			return err
		}
	}
	if slices.Contains(h.Rate, nil) || slices.Contains(h.Concurrency, nil) {
		return errors.New("a limit is null; leave it out")
	}
	if err := h.validateLimits(); err != nil {
		return err
	}
	if h.IPv6Prefix != 0 && (h.IPv6Prefix < 48 || h.IPv6Prefix > 64) {
		return fmt.Errorf("ipv6_prefix %d is not between 48 and 64", h.IPv6Prefix)
	}
	if h.TestModeOff && len(h.TestModeRaw) > 0 {
		return errors.New("test_mode has matchers and is off; choose one")
	}
	for option, sets := range map[string]caddyhttp.RawMatcherSets{"exempt": h.ExemptRaw, "critical": h.CriticalRaw} {
		if slices.ContainsFunc(sets, func(set caddy.ModuleMap) bool { return len(set) == 0 }) {
			return fmt.Errorf("%s has a matcher set without matchers, which matches every request; leave it out", option)
		}
	}
	return cmp.Or(
		h.validateShedders(),
		validateKey(h.Key),
		h.Mode.validate(),
		validateWord("on_store_error", h.OnStoreError, storeErrorWords),
		validateWord("should_retry", h.ShouldRetry, shouldRetryWords),
		validateWord("reject", h.Reject, rejectWords),
		validateDocURL(h.DocURL),
	)
}

// alternatives lists words: a, b or c.
func alternatives(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// validateWord checks an option that takes one of a few words; the empty word
// is the default.
func validateWord(option, word string, words []string) error {
	if word != "" && !slices.Contains(words, word) {
		return fmt.Errorf("%s '%s' is not %s", option, word, alternatives(words))
	}
	return nil
}

func validateDocURL(s string) error {
	if s == "" {
		return nil
	}
	if u, err := url.Parse(s); err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return fmt.Errorf("doc_url '%s' is not an http:// or https:// address", s)
	}
	return nil
}
