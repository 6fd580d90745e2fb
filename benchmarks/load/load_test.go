// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// The Caddys and the upstream are this program in other roles.
func TestMain(m *testing.M) {
	if play() {
		return
	}
	os.Exit(m.Run())
}

// Every kind of load, for a moment, so that the command always works. What it
// measures in so short a time means nothing.
func TestRun(t *testing.T) {
	if _, err := exec.LookPath("redis-server"); err != nil && os.Getenv("CI") == "" {
		t.Skip("redis-server is not on the PATH")
	}
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "docs"), 0o700); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{
		"README.md":           "a\n<!-- measured: summary -->\nold\n<!-- measured: end -->\nz\n",
		"docs/performance.md": "a\n<!-- measured: bars -->\nold\n<!-- measured: end -->\n<!-- measured: figures -->\nold\n<!-- measured: end -->\nz\n",
	} {
		if err := os.WriteFile(filepath.Join(root, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	o := options{
		length: 200 * time.Millisecond, rounds: 1, users: 100,
		only: regexp.MustCompile(`^(four|sample)/respond/h1/uniform|^four/(proxy|respond)/h2|^flood/|^abuser/`),
		json: filepath.Join(root, "load.json"), docs: root,
	}
	if err := run(t.Context(), o); err != nil {
		t.Fatal(err)
	}

	var r report
	text, err := os.ReadFile(o.json)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	names := map[string]*series{}
	for _, s := range r.Series {
		names[s.String()] = s
		if len(s.Rounds) != 1 || s.Rounds[0].Requests == 0 || s.Rounds[0].Caddy == 0 || s.Rounds[0].Allocs == 0 {
			t.Errorf("%s: got %+v, want a round with requests", s, s.Rounds)
		}
	}
	four, sample := names["four/respond/h1/uniform"], names["sample/respond/h1/uniform"]
	for _, name := range []string{"bare/respond/h1/uniform", "bare/proxy/h2/uniform", "flood-bare/respond/h1/hot", "four/respond/h1/uniform/2000"} {
		if names[name] == nil {
			t.Errorf("%s was not measured", name)
		}
	}
	if four == nil || sample == nil {
		t.Fatalf("got %d scenarios, without four or sample", len(r.Series))
	}
	if four.Sent["evalsha"] == 0 || four.Rounds[0].Redis == 0 {
		t.Errorf("four: Redis is sent %v and used %v us, want some", four.Sent, four.Rounds[0].Redis)
	}
	if got := sample.sent(); got < 3.99 || got > 4.01 {
		t.Errorf("the sample sends %v, want 4 for each request", sample.Sent)
	}
	if p := names["flood/respond/h1/hot"].Rounds[0]; p.Denied != 1 {
		t.Errorf("flood: %v of the requests are denied, want all", p.Denied)
	}
	if p := names["abuser/respond/h1/abuser"].Rounds[0]; p.Denied > 0.95 {
		t.Errorf("abuser: %v of the requests are denied, want none but the abuser's", p.Denied)
	}
	if r.Memory == nil || r.Memory.Redis < 50 || r.Memory.Process == 0 {
		t.Errorf("memory: got %+v", r.Memory)
	}
	if m := r.Machine; m.Caddy == "" || m.Redis == "" || m.Cores == 0 {
		t.Errorf("machine: got %+v, want all versions", m)
	}

	for file, want := range map[string]string{
		"README.md":            "| Redis, all four |",
		"docs/performance.md":  "all four on Redis: added CPU",
		"docs/performance.svg": "<svg",
	} {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil || !strings.Contains(string(text), want) || strings.Contains(string(text), "\nold\n") {
			t.Errorf("%s: got %v, want %q in\n%s", file, err, want, text)
		}
	}
}

// An interrupt ends it at once, and everything it started with it.
func TestRun_Interrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	l, err := open(ctx, []scenario{{bare, "respond", "h1", "uniform", 0}})
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := l.measure(ctx, scenario{bare, "respond", "h1", "uniform", 0}, time.Hour); err != context.Canceled {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
	l.close()
	for _, p := range []*process{l.upstream.process, l.servers[bare].process} {
		select {
		case <-p.done:
		default:
			t.Errorf("%s is still there", p.name)
		}
	}
}

func TestChoose(t *testing.T) {
	all := scenarios()
	names := map[string]bool{}
	for _, s := range all {
		if names[s.String()] {
			t.Errorf("%s: twice", s)
		}
		names[s.String()] = true
	}
	for _, s := range all {
		if !names[s.reference().String()] {
			t.Errorf("%s: its reference %s is not measured", s, s.reference())
		}
	}
	cases := []struct {
		only string
		want []string
	}{
		{`^four/proxy/h1`, []string{"bare/proxy/h1/uniform", "four/proxy/h1/uniform", "bare/proxy/h1/uniform/2000", "four/proxy/h1/uniform/2000"}},
		{`^flood/`, []string{"flood-bare/respond/h1/hot", "flood/respond/h1/hot"}},
		{`zipf`, []string{"bare/respond/h1/uniform", "four/respond/h1/zipf"}},
		{`nothing`, nil},
	}
	for _, c := range cases {
		var got []string
		for _, s := range choose(all, regexp.MustCompile(c.only)) {
			got = append(got, s.String())
		}
		if strings.Join(got, " ") != strings.Join(c.want, " ") {
			t.Errorf("%s: got %q, want %q", c.only, got, c.want)
		}
	}
}

func TestNewPicker(t *testing.T) {
	// How many of 10,000 requests the busiest user sends, and how many users there are.
	cases := []struct {
		keys              string
		busiest, busiest2 int // from, to
		users, users2     int
	}{
		{"uniform", 1, 20, 6000, 7000},
		{"zipf", 1000, 4000, 500, 4000},
		{"hot", 10_000, 10_000, 1, 1},
		{"abuser", 8900, 9100, 800, 1100},
	}
	for _, c := range cases {
		pick := newPicker(c.keys, 1)
		counts := map[int]int{}
		for range 10_000 {
			counts[pick()]++
		}
		busiest := 0
		for _, n := range counts {
			busiest = max(busiest, n)
		}
		if busiest < c.busiest || busiest > c.busiest2 || len(counts) < c.users || len(counts) > c.users2 {
			t.Errorf("%s: %d users, of whom one sends %d", c.keys, len(counts), busiest)
		}
	}
}
