// SPDX-License-Identifier: Apache-2.0

package caddyproc

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// site returns the Caddyfile of a site that answers with body, and its URL.
func site(port int, body string) (caddyfile, url string) {
	url = fmt.Sprintf("http://127.0.0.1:%d", port)
	return url + " {\n\tbind 127.0.0.1\n\trespond " + body + "\n}\n", url
}

func get(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, body := do(t, req)
	return body
}

func TestProcess(t *testing.T) {
	port := FreePort(t)
	caddyfile, url := site(port, "{$GREETING}")
	p := Start(t, caddyfile, "GREETING=hello")
	if got := get(t, url); got != "hello" {
		t.Errorf("GET: got %q, want hello", got)
	}
	if !strings.Contains(p.Logs(), "serving initial configuration") {
		t.Errorf("Logs: got %q, want the start in it", p.Logs())
	}
	if got := p.Metrics(t); !strings.Contains(got, "\ngo_goroutines ") {
		t.Errorf("Metrics: got %q, want go_goroutines in it", got)
	}

	caddyfile, _ = site(port, "again")
	if status, body := p.Load(t, caddyfile); status != http.StatusOK {
		t.Errorf("Load: got %d %s, want 200", status, body)
	}
	if got := get(t, url); got != "again" {
		t.Errorf("GET after Load: got %q, want again", got)
	}
	bad := strings.Replace(caddyfile, "respond", "no_such_directive", 1)
	if status, body := p.Load(t, bad); status != http.StatusBadRequest || !strings.Contains(body, "no_such_directive") {
		t.Errorf("Load of a bad config: got %d %s, want 400 and the reason", status, body)
	}
	if got := get(t, url); got != "again" {
		t.Errorf("GET after a bad Load: got %q, want again", got)
	}

	p.Stop()
	if _, err := net.Dial("tcp", strings.TrimPrefix(url, "http://")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after Stop: got %v, want %v", err, syscall.ECONNREFUSED)
	}
	if !strings.Contains(p.Logs(), "shutdown complete") {
		t.Errorf("Logs: got %q, want the shutdown in it", p.Logs())
	}
	p.Kill() // does nothing
}

func TestStart_NeedsNoAdmin(t *testing.T) {
	caddyfile, url := site(FreePort(t), "quiet")
	p := Start(t, "{\n\tadmin off\n\tlog {\n\t\toutput discard\n\t}\n}\n"+caddyfile)
	if got := get(t, url); got != "quiet" {
		t.Errorf("GET: got %q, want quiet", got)
	}
	p.Kill()
	if _, err := net.Dial("tcp", strings.TrimPrefix(url, "http://")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after Kill: got %v, want %v", err, syscall.ECONNREFUSED)
	}
}

// recorder is a test that may fail without failing this one.
type recorder struct {
	testing.TB
	failed bool
}

func (r *recorder) Errorf(format string, args ...any) { r.failed = true }
func (r *recorder) Failed() bool                      { return r.failed }
func (r *recorder) Logf(string, ...any)               {}

func TestProcess_CleanupFindsRacesAndPanics(t *testing.T) {
	cases := map[string]bool{
		"all is well\n": false,
		"==================\nWARNING: DATA RACE\nWrite at\n":       true,
		"panic: runtime error: invalid memory address\n":           true,
		"{\"level\":\"info\"}\nfatal error: concurrent map writes": true,
		`{"level":"error","msg":"this is no panic: a quote"}`:      false,
	}
	for output, want := range cases {
		cmd := exec.Command("/bin/cat")
		r := &recorder{TB: t}
		p := &Process{t: r, cmd: cmd, dead: make(chan struct{})}
		close(p.dead)
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		_, _ = p.log.Write([]byte(output))
		p.cleanup()
		if r.failed != want {
			t.Errorf("cleanup after %q: failed %v, want %v", output, r.failed, want)
		}
	}
}

// Binaries are large: the directory must go with the test binary, even one that
// is killed. The test runs itself as that binary.
func TestRemoveAtExit(t *testing.T) {
	if dir := os.Getenv("CADDYPROC_REMOVE"); dir != "" {
		if err := removeAtExit(dir); err != nil {
			t.Fatal(err)
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	dir := filepath.Join(t.TempDir(), "it's a \"dir\"")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	victim := exec.Command(os.Args[0], "-test.run=^TestRemoveAtExit$")
	victim.Env = append(os.Environ(), "CADDYPROC_REMOVE="+dir)
	if out, err := victim.CombinedOutput(); err == nil {
		t.Fatalf("the victim lives:\n%s", out)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		_, err := os.Stat(dir)
		if errors.Is(err, os.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("stat: got %v, want %v", err, os.ErrNotExist)
		}
	}
}
