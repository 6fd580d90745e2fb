// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A small fleet, so that the command always works.
func TestRun(t *testing.T) {
	if _, err := exec.LookPath("redis-server"); err != nil && os.Getenv("CI") == "" {
		t.Skip("redis-server is not on the PATH")
	}
	var out strings.Builder
	if err := run(&out, 5, time.Second, time.Second); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &out)
	for _, phase := range []string{"beating", "refused"} {
		_, line, _ := strings.Cut(out.String(), "\n"+phase)
		var syncs, controls, us, refused float64
		if _, err := fmt.Sscan(line, &syncs, &controls, &us, &refused); err != nil {
			t.Fatal(err)
		}
		if syncs == 0 || controls == 0 || us == 0 || (refused > 0) != (phase == "refused") {
			t.Errorf("%s: %v syncs, %v controls and %v refused a second, %v us each", phase, syncs, controls, refused, us)
		}
	}
}
