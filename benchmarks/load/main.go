// SPDX-License-Identifier: Apache-2.0

// Command load measures what this module costs a request. It starts Caddys and
// redis-servers, one pair for each way to limit, drives them in turn, several
// rounds long, and stops them.
//
//	go run -C benchmarks ./load -short
//	go run -C benchmarks ./load -only 'four/respond/h1' -json four.json
//	go run -C benchmarks ./load -only 'four/respond/h1/uniform$' -profiles /tmp/profiles
//	go run -C benchmarks ./load -docs ..
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/stripe-ratelimit/caddy-stripe-ratelimit"
)

// This program is also the Caddys and the upstream that it measures.
const (
	roleEnv      = "LOAD_ROLE"
	caddyRole    = "caddy"
	upstreamRole = "upstream"
)

func main() {
	if play() {
		return
	}
	var o options
	flag.DurationVar(&o.length, "duration", 1500*time.Millisecond, "how long a scenario is measured in each round")
	flag.IntVar(&o.rounds, "rounds", 5, "how many rounds there are")
	only := flag.String("only", "", "measure the scenarios that match this regular expression, and what they are compared with")
	flag.StringVar(&o.json, "json", "", "write everything to this file")
	flag.StringVar(&o.docs, "docs", "", "bring the tables and the plot in this folder's README.md and docs/ up to date")
	flag.StringVar(&o.profiles, "profiles", "", "in the end write a CPU profile of Caddy in each scenario into this folder")
	short := flag.Bool("short", false, "measure briefly: two rounds of 300ms")
	list := flag.Bool("list", false, "list the scenarios")
	flag.Parse()
	o.users = 100_000
	if *short {
		o.length, o.rounds, o.users = 300*time.Millisecond, 2, 20_000
	}
	if *only != "" {
		o.users = 0
	}
	var err error
	if o.only, err = regexp.Compile(*only); err != nil {
		fail(err)
	}
	if *list {
		for _, s := range choose(scenarios(), o.only) {
			fmt.Println(s)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, o)
	stop()
	if err != nil {
		fail(err)
	}
}

// fail ends this process. Package log is Caddy's here.
func fail(err error) {
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}

// play plays the role that this process was started for, if there is one.
func play() bool {
	switch os.Getenv(roleEnv) {
	case caddyRole:
		caddycmd.Main()
	case upstreamRole:
		fail(runUpstream(os.Args[1]))
	default:
		return false
	}
	return true
}

type options struct {
	length     time.Duration
	rounds     int
	only       *regexp.Regexp
	json, docs string
	profiles   string
	users      int // whose memory is measured
}

func run(ctx context.Context, o options) error {
	all := choose(scenarios(), o.only)
	if len(all) == 0 {
		return fmt.Errorf("no scenario matches %q; -list lists them", o.only)
	}
	r := &report{When: time.Now().UTC(), Length: o.length, Count: o.rounds}
	if err := r.measure(ctx, all, o); err != nil {
		return err
	}
	r.Bars = r.bars()
	fmt.Println(r.text())
	if o.json != "" {
		b, err := json.MarshalIndent(r, "", "\t")
		if err != nil {
			return err
		}
		if err := os.WriteFile(o.json, append(b, '\n'), 0o644); err != nil {
			return err
		}
	}
	if o.docs != "" {
		return r.document(o.docs)
	}
	return nil
}

// measure fills a report, and stops all that it started.
func (r *report) measure(ctx context.Context, all []scenario, o options) error {
	lab, err := open(ctx, all)
	if err != nil {
		return err
	}
	defer lab.close()
	for _, s := range lab.servers {
		if r.Machine.Redis == "" {
			r.Machine = describeMachine(ctx, s.redis)
		}
	}
	if r.Series, err = lab.measureAll(ctx, os.Stderr, all, o.rounds, o.length); err != nil {
		return err
	}
	if o.profiles != "" {
		for _, s := range all {
			if err := lab.profile(ctx, s, o.length, o.profiles); err != nil {
				return fmt.Errorf("%s: profile: %w", s, err)
			}
		}
	}
	if o.users > 0 {
		r.Memory, err = measureMemory(ctx, o.users)
	}
	return err
}
