// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("stripe_ratelimit", parseGlobalOption)
	httpcaddyfile.RegisterHandlerDirective("stripe_ratelimit", parseDirective)
	// After authentication, so that a key can be a user who has proved it.
	httpcaddyfile.RegisterDirectiveOrder("stripe_ratelimit", httpcaddyfile.After, "forward_auth")
}

func parseDirective(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	return h, h.unmarshal(helper)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	stripe_ratelimit [<matcher>] [<pool>] {
//		key         <source>...
//		exempt      <@matcher|/path>... | { <matchers> }
//		critical    <@matcher|/path>... | { <matchers> }
//		test_mode   <@matcher|/path>... | { <matchers> } | off
//		rate        [<limit>] <n>/<unit> [burst <n>] [cost <n>] [key <source>...] [match <@matcher|/path>...] [mode <mode>]
//		concurrency [<limit>] <n> [lease <duration>] [key <source>...] [match <@matcher|/path>...] [mode <mode>]
//		fleet       <capacity|auto> reserve <percent> [mode <mode>]
//		workers     [<n>] [good <percent>] [bad <percent>] [grace <duration>] [ramp <duration>] [utilization <source> <args>...] [mode <mode>]
//		mode        off | dark | enforce [<percent>]
//		on_store_error    open | local | closed
//		ratelimit_headers on | off
//		should_retry      omit | auto
//		doc_url           <url>
//		reject            json | error
//		ipv6_prefix       <48..64>
//	}
//
// At least one of rate, concurrency, fleet and workers is required; the first
// two may be given several times, with different names. The options of all four
// stand on the same line, as above, or one a line in a block of their own. Every
// other option is given at most once.
//
// A pool or limit is named by a lower-case letter and up to 31 of a-z, 0-9, _
// and -; the name of an option is none. A unit is s, m, h, d or a duration,
// such as 10s. A percentage is 20 or 20%. A source is api_key, client_ip or a
// text with placeholders. Named matchers are those of the site and of the
// blocks around the directive. The fields of Handler tell meanings and
// defaults.
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return h.unmarshal(httpcaddyfile.Helper{Dispenser: d})
}

// unmarshal is UnmarshalCaddyfile with a helper, which knows named matchers.
func (h *Handler) unmarshal(helper httpcaddyfile.Helper) error {
	d := helper.Dispenser
	d.Next() // the directive's name
	args, err := options{
		"key":               readKey(&h.Key),
		"exempt":            readMatchers(helper, &h.ExemptRaw),
		"critical":          readMatchers(helper, &h.CriticalRaw),
		"test_mode":         h.unmarshalTestMode(helper),
		"rate":              h.unmarshalRate(helper),
		"concurrency":       h.unmarshalConcurrency(helper),
		"fleet":             h.unmarshalFleet,
		"workers":           h.unmarshalWorkers,
		"mode":              readMode(&h.Mode),
		"on_store_error":    readWord(&h.OnStoreError, storeErrorWords),
		"ratelimit_headers": readOnOff(&h.RateLimitHeaders),
		"should_retry":      readWord(&h.ShouldRetry, shouldRetryWords),
		"doc_url":           h.unmarshalDocURL,
		"reject":            readWord(&h.Reject, rejectWords),
		"ipv6_prefix":       readNumber(&h.IPv6Prefix, 48, 64),
	}.read(d, false)
	if err != nil {
		return err
	}
	if len(args) > 1 {
		return atStart(d, fmt.Errorf("unexpected '%s' after the pool '%s'; options stand in a block, one a line", args[1], args[0]))
	}
	if len(args) == 1 {
		if err := validateName("pool", args[0], ""); err != nil {
			return atStart(d, err)
		}
		h.Pool = args[0]
	}
	return atStart(d, h.validateConfig())
}

func (h *Handler) unmarshalTestMode(helper httpcaddyfile.Helper) option {
	return func(d *caddyfile.Dispenser) error {
		if d.CountRemainingArgs() == 1 {
			if d.NextArg(); d.Val() == "off" {
				h.TestModeOff = true
				return nil
			}
			d.Prev()
		}
		return readMatchers(helper, &h.TestModeRaw)(d)
	}
}

func (h *Handler) unmarshalDocURL(d *caddyfile.Dispenser) error {
	if err := readText(&h.DocURL)(d); err != nil {
		return err
	}
	return atStart(d, validateDocURL(h.DocURL))
}

func (h *Handler) unmarshalRate(helper httpcaddyfile.Helper) option {
	return func(d *caddyfile.Dispenser) error {
		rl := new(RateLimit)
		h.Rate = append(h.Rate, rl)
		return h.unmarshalLimit(d, "100/s", options{
			"burst": readNumber(&rl.Burst, 1, math.MaxInt64),
			"cost":  readNumber(&rl.Cost, 1, math.MaxInt64),
			"key":   readKey(&rl.Key),
			"match": readMatcherList(helper, &rl.MatchRaw),
			"mode":  readMode(&rl.Mode),
		}, func(name, amount string) (err error) {
			rl.Name = name
			rl.Requests, rl.Per, err = parseRate(amount)
			return err
		})
	}
}

func (h *Handler) unmarshalConcurrency(helper httpcaddyfile.Helper) option {
	return func(d *caddyfile.Dispenser) error {
		cl := new(ConcurrencyLimit)
		h.Concurrency = append(h.Concurrency, cl)
		return h.unmarshalLimit(d, "20", options{
			"lease": readDuration(&cl.Lease),
			"key":   readKey(&cl.Key),
			"match": readMatcherList(helper, &cl.MatchRaw),
			"mode":  readMode(&cl.Mode),
		}, func(name, amount string) (err error) {
			cl.Name = name
			if cl.Capacity, err = strconv.ParseInt(amount, 10, 64); err != nil {
				return fmt.Errorf("concurrency '%s' is not a whole number, such as 20", amount)
			}
			return nil
		})
	}
}

// unmarshalLimit reads what rate and concurrency have in common. The limits so
// far are checked at once, so that the mistake of this one has its line.
func (h *Handler) unmarshalLimit(d *caddyfile.Dispenser, example string, opts options, set func(name, amount string) error) error {
	kind := d.Val()
	args, err := opts.read(d, true)
	if err != nil {
		return err
	}
	var name string
	if len(args) > 0 && !isAmount(args[0]) || len(args) > 1 && isAmount(args[1]) {
		name, args = args[0], args[1:]
	}
	switch {
	case len(args) == 0:
		err = fmt.Errorf("'%s' needs a number, such as %s", kind, example)
	case len(args) > 1:
		err = fmt.Errorf("unexpected '%s' after '%s %s'; its options are %s", args[1], kind, args[0], opts)
	default:
		err = cmp.Or(set(name, args[0]), h.validateLimits())
	}
	return atStart(d, err)
}

// isAmount tells the number of a limit from its name.
func isAmount(s string) bool {
	return s != "" && strings.Contains("0123456789+-.", s[:1])
}
