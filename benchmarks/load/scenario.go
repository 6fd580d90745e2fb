// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
)

// setup is a way to limit, and a Caddy (with a redis-server of its own, if it
// uses one) for it. Each Caddy has two sites: one responds, one is a proxy.
type setup struct {
	name  string
	about string // what the tables call it
	redis bool

	app     string // lines of the app's global option
	handler string // lines before respond and reverse_proxy; REDIS is the address
}

// Numbers that nobody reaches, and some that an abuser does.
const (
	rateLimit   = "rate 100000/s burst 500000\n"
	concurrency = "concurrency 1000\n"
	shedders    = "critical /v1/charges\nfleet 100000 reserve 20%\nworkers 10000\n"

	once  = "rate 1/h burst 1\n"
	tight = "rate 200/s burst 200\n"

	onRedis = "redis REDIS\nkey_secret 0123456789abcdef0123456789abcdef\n"
)

var setups = []setup{
	{name: bare, about: "bare Caddy"},
	{name: "memory", about: "memory store, all four", handler: limited(rateLimit, concurrency, shedders)},
	{name: "rate", about: "Redis, rate", redis: true, app: onRedis, handler: limited(rateLimit)},
	{name: "both", about: "Redis, rate + concurrency", redis: true, app: onRedis, handler: limited(rateLimit, concurrency)},
	{name: "four", about: "Redis, all four", redis: true, app: onRedis, handler: limited(rateLimit, concurrency, shedders)},
	{name: "waiting", about: "a PING to Redis, shared by all who wait", redis: true, handler: "load_waiting REDIS"},
	{name: "sample", about: "the sample's way, rate + concurrency", redis: true, handler: "load_sample REDIS"},
	{name: "sample3", about: "the sample's way, and its fleet", redis: true, handler: "load_sample REDIS fleet"},
	{name: "abuser", about: "Redis, all four, 9 of 10 by one abuser", redis: true, app: onRedis, handler: limited(tight, concurrency, shedders)},
	{name: "flood", about: "a flood being denied", redis: true, app: onRedis, handler: limited(once, concurrency, shedders)},
	{name: bareFlood, about: "bare respond, the same 429", handler: "load_respond * DENIAL"},
}

// The setups that others are compared with.
const (
	bare      = "bare"
	bareFlood = "flood-bare"
)

func limited(lines ...string) string {
	return "stripe_ratelimit {\n" + strings.Join(lines, "") + "}"
}

// caddyfile returns the Caddyfile of a setup. Two sites differ in who answers.
func (s setup) caddyfile(admin string, respond, proxy int, upstream, redis, denial string) string {
	app := ""
	if s.app != "" {
		app = "stripe_ratelimit {\n" + s.app + "}\n"
	}
	text := fmt.Sprintf(`{
admin %s
auto_https off
persist_config off
default_bind 127.0.0.1
grace_period 1s
order load_sample before respond
order load_waiting before respond
order load_respond before respond
log {
level ERROR
}
servers {
protocols h1 h2c
}
%s}
:%d {
%s
respond ok
}
:%d {
%s
reverse_proxy %s {
transport http {
keepalive_idle_conns_per_host 1024
}
}
}
`, admin, app, respond, s.handler, proxy, s.handler, upstream)
	return strings.NewReplacer("REDIS", redis, "DENIAL", denial).Replace(text)
}

// scenario is what is measured as one: a load on a setup.
type scenario struct {
	Setup    string  `json:"setup"`
	Answer   string  `json:"answer"`         // respond or proxy
	Protocol string  `json:"protocol"`       // h1 or h2
	Keys     string  `json:"keys"`           // uniform, zipf, hot or abuser
	Rate     float64 `json:"rate,omitempty"` // requests a second, or 0: as many as possible
}

func (s scenario) String() string {
	name := strings.Join([]string{s.Setup, s.Answer, s.Protocol, s.Keys}, "/")
	if s.Rate > 0 {
		name += fmt.Sprintf("/%.0f", s.Rate)
	}
	return name
}

// reference returns the scenario that s is compared with.
func (s scenario) reference() scenario {
	s.Keys = "uniform"
	if strings.HasPrefix(s.Setup, "flood") {
		s.Keys = "hot"
		s.Setup = bareFlood
	} else {
		s.Setup = bare
	}
	return s
}

// openRate is the rate at which latency is measured, requests a second.
const openRate = 2000

// scenarios returns all that is measured, in the order of one round.
func scenarios() (all []scenario) {
	add := func(answer, protocol, keys string, rate float64, names ...string) {
		for _, name := range names {
			all = append(all, scenario{name, answer, protocol, keys, rate})
		}
	}
	add("respond", "h1", "uniform", 0, bare, "memory", "waiting", "rate", "both", "four", "sample", "sample3")
	add("proxy", "h1", "uniform", 0, bare, "memory", "waiting", "rate", "both", "four", "sample")
	add("proxy", "h1", "abuser", 0, "abuser")
	add("respond", "h1", "hot", 0, bareFlood, "flood")
	add("respond", "h1", "zipf", 0, "four")
	add("respond", "h1", "hot", 0, "four")
	add("respond", "h1", "abuser", 0, "abuser")
	add("respond", "h2", "uniform", 0, bare, "memory", "four", "sample")
	add("proxy", "h2", "uniform", 0, bare, "four")
	add("respond", "h1", "uniform", openRate, bare, "memory", "waiting", "four", "sample")
	add("proxy", "h1", "uniform", openRate, bare, "memory", "four", "sample")
	return all
}

// choose returns the scenarios whose name matches, and what they are compared with.
func choose(all []scenario, only *regexp.Regexp) (chosen []scenario) {
	wanted := map[scenario]bool{}
	for _, s := range all {
		if only.MatchString(s.String()) {
			wanted[s], wanted[s.reference()] = true, true
		}
	}
	for _, s := range all {
		if wanted[s] {
			chosen = append(chosen, s)
		}
	}
	return chosen
}

// keyCount is how many users there are.
const keyCount = 10_000

// newPicker returns a function that draws who sends the next request.
func newPicker(keys string, seed uint64) func() int {
	r := rand.New(rand.NewPCG(seed, 1))
	switch keys {
	case "zipf":
		zipf := rand.NewZipf(r, 1.1, 1, keyCount-1)
		return func() int { return int(zipf.Uint64()) }
	case "hot":
		return func() int { return 0 }
	case "abuser":
		return func() int {
			if r.IntN(10) > 0 {
				return 0
			}
			return r.IntN(keyCount)
		}
	}
	return func() int { return r.IntN(keyCount) }
}

// apiKey returns the API key of a user.
func apiKey(user int) string { return fmt.Sprintf("sk_live_51HzAbCdEfGhIjKl%06d", user) }
