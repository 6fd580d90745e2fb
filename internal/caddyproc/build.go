// SPDX-License-Identifier: Apache-2.0

package caddyproc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// binary builds cmd/caddy, once for each test binary, and returns its path.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "caddyproc-")
	if err != nil {
		return "", err
	}
	if err := removeAtExit(dir); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "caddy")
	args := []string{"build", "-buildvcs=false", "-o", path}
	if raceEnabled {
		args = append(args, "-race")
	}
	args = append(args, "github.com/stripe-ratelimit/caddy-stripe-ratelimit/cmd/caddy")
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go %q: %w\n%s", args, err, out)
	}
	return path, nil
})

// alive holds the pipes that nothing but the end of this process closes.
var alive []*os.File

// removeAtExit removes dir when this process ends, however it ends. Nothing in a
// test binary runs after its last test, so another process waits for that.
func removeAtExit(dir string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	alive = append(alive, w)
	cmd := exec.Command("/bin/sh", "-c", `cat; rm -rf "$0"`, dir)
	cmd.Stdin = r
	return cmd.Start()
}
