// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A moment of everything, so that the command always works.
func TestRun(t *testing.T) {
	if _, err := exec.LookPath("redis-server"); err != nil && os.Getenv("CI") == "" {
		t.Skip("redis-server is not on the PATH")
	}
	var out strings.Builder
	if err := run(t.Context(), &out, 50*time.Millisecond, 100*time.Millisecond, 10); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &out)
	for _, want := range []string{"\nrate + concurrency                 256 ", "\n10 leases of 10s held: ", "busiest master"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing", want)
		}
	}
}

func TestBusiest(t *testing.T) {
	equal := func(int) float64 { return 1 }
	first := func(rank int) float64 { return float64(1 / rank) } // in integers: the first alone
	cases := []struct {
		name    string
		masters int
		weight  func(int) float64
		low     float64
		high    float64
	}{
		{"one has it all", 1, equal, 1, 1},
		{"many equal users even out", 10, equal, 1.01, 1.1},
		{"one user is on one master", 10, first, 10, 10},
	}
	for _, c := range cases {
		if got := busiest(c.masters, c.weight); got < c.low-1e-9 || got > c.high+1e-9 {
			t.Errorf("%s: got %v, want %v to %v", c.name, got, c.low, c.high)
		}
	}
}
