// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// report is all that a run tells. It is what -json writes.
type report struct {
	Machine machine       `json:"machine"`
	When    time.Time     `json:"when"`
	Length  time.Duration `json:"duration"`
	Count   int           `json:"rounds"`
	Bars    []bar         `json:"bars"`
	Memory  *memory       `json:"memory,omitempty"`
	Series  []*series     `json:"scenarios"`
}

// machine is what a run ran on, and what it ran.
type machine struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	System string `json:"system"`
	Go     string `json:"go"`
	Caddy  string `json:"caddy"`
	Redis  string `json:"redis"`
	Commit string `json:"commit"`
}

func describeMachine(ctx context.Context, rdb *redis.Client) (m machine) {
	m = machine{CPU: runtime.GOARCH, Cores: runtime.NumCPU(), System: runtime.GOOS, Go: runtime.Version()}
	cpuinfo, _ := os.ReadFile("/proc/cpuinfo")
	if name := field(string(cpuinfo), "model name"); name != "" {
		m.CPU = name
	}
	// What is unknown is left empty.
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, d := range build.Deps {
			if d.Path == "github.com/caddyserver/caddy/v2" {
				m.Caddy = d.Version
			}
		}
	}
	if rdb != nil {
		info, _ := rdb.Info(ctx, "server").Result()
		m.Redis = field(info, "redis_version")
	}
	commit, _ := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output()
	m.Commit = strings.TrimSpace(string(commit))
	return m
}

// field returns the value of the first line "name: value".
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// find returns the measurements of a scenario, or nil.
func (r *report) find(s scenario) *series {
	for _, c := range r.Series {
		if c.scenario == s {
			return c
		}
	}
	return nil
}

// spread is a median with the least and the greatest value.
type spread struct{ low, median, high float64 }

func spreadOf(values []float64) (s spread) {
	if len(values) == 0 {
		return s
	}
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	return spread{v[0], (v[(n-1)/2] + v[n/2]) / 2, v[n-1]}
}

// over returns what f says of every round.
func (s *series) over(f func(point) float64) spread {
	values := make([]float64, len(s.Rounds))
	for i, p := range s.Rounds {
		values[i] = f(p)
	}
	return spreadOf(values)
}

// against returns what f says of every round and that of a reference, which
// were measured soon after each other.
func (s *series) against(ref *series, f func(p, ref point) float64) spread {
	if ref == nil {
		return spread{}
	}
	var values []float64
	for i := range min(len(s.Rounds), len(ref.Rounds)) {
		values = append(values, f(s.Rounds[i], ref.Rounds[i]))
	}
	return spreadOf(values)
}

// sent returns how many commands Redis is sent for each request.
func (s *series) sent() (n float64) {
	for _, calls := range s.Sent {
		n += calls
	}
	return n
}

// What is said about a scenario and its reference.
func addedCPU(p, ref point) float64    { return p.cpu() - ref.cpu() }
func addedAllocs(p, ref point) float64 { return p.Allocs - ref.Allocs }
func addedP50(p, ref point) float64    { return p.P50 - ref.P50 }
func addedP99(p, ref point) float64    { return p.P99 - ref.P99 }
func ofRate(p, ref point) float64      { return p.Rate / ref.Rate }
