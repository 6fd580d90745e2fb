// SPDX-License-Identifier: Apache-2.0

// Package caddyproc runs the Caddy of cmd/caddy for tests: real processes, which
// can be reloaded, signalled and killed, and which end with the test. Built with
// the race detector if the test is, and a race that one reports fails its test.
//
//	site := fmt.Sprintf("http://127.0.0.1:%d", caddyproc.FreePort(t))
//	caddy := caddyproc.Start(t, site+" {\n bind 127.0.0.1 \n respond ok \n}")
//
// Without bind (or the global default_bind) a site listens on all interfaces.
package caddyproc

import (
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// patience bounds every wait for a process. It is long because it only ever
// passes when something is broken, and machines that test are busy.
const patience = 60 * time.Second

// Process is a running Caddy. Its methods fail the test that started it.
type Process struct {
	// Admin is the host:port of the admin API, unless the config moves it.
	Admin string

	// Dir is the process's working directory, with its Caddyfile.
	Dir string

	t    testing.TB
	cmd  *exec.Cmd
	dead chan struct{} // closed once the process has been reaped
	log  redistest.Output
}

// FreePort returns a TCP port of 127.0.0.1 that no other test is given.
func FreePort(t testing.TB) int {
	t.Helper()
	return redistest.FreePort(t)
}

// Command returns a command of Caddy, such as validate, that works in dir and
// has its data there.
func Command(t testing.TB, dir string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(),
		"XDG_DATA_HOME="+filepath.Join(dir, "data"),
		"XDG_CONFIG_HOME="+filepath.Join(dir, "config"),
		// One with the race detector sleeps for a second before it ends.
		"GORACE=atexit_sleep_ms=10 "+os.Getenv("GORACE"),
	)
	return cmd
}

// Start runs `caddy run` with the Caddyfile and returns once the config is
// running. Each env is a "KEY=value" that is added to the environment. Data and
// admin API are the process's own without the Caddyfile's doing.
func Start(t testing.TB, caddyfile string, env ...string) *Process {
	t.Helper()
	p := &Process{
		Admin: fmt.Sprintf("127.0.0.1:%d", FreePort(t)),
		Dir:   t.TempDir(),
		t:     t,
		dead:  make(chan struct{}),
	}
	file := filepath.Join(p.Dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(caddyfile), 0o600); err != nil {
		t.Fatal(err)
	}
	// Caddy dials the pingback address and sends what it finds on its standard
	// input once the config runs; `caddy start` works that way.
	pingback, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pingback.Close()
	token := rand.Text()

	p.cmd = Command(t, p.Dir, "run", "--config", file, "--adapter", "caddyfile",
		"--pingback", pingback.Addr().String())
	p.cmd.Env = append(p.cmd.Env, "CADDY_ADMIN="+p.Admin)
	p.cmd.Env = append(p.cmd.Env, env...)
	p.cmd.Stdin = strings.NewReader(token)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	redistest.TieToParent(p.cmd)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.dead)
		_ = pingback.Close() // so that nobody waits for a dead process
	}()
	t.Cleanup(p.cleanup)
	if err := await(pingback, token); err != nil {
		t.Fatalf("start caddy: it ended or hangs before its config runs: %v", err)
	}
	return p
}

// await returns once somebody sends the token.
func await(l net.Listener, token string) error {
	_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(patience))
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		got, _ := io.ReadAll(conn)
		_ = conn.Close()
		if string(got) == token {
			return nil
		}
	}
}

func (p *Process) cleanup() {
	p.Kill()
	logs := p.Logs()
	for _, bad := range []string{"WARNING: DATA RACE", "\npanic: ", "\nfatal error: "} {
		if strings.Contains("\n"+logs, bad) {
			p.t.Errorf("caddy: %s", strings.TrimSpace(bad))
		}
	}
	if p.t.Failed() {
		p.t.Logf("caddy, admin %s:\n%s", p.Admin, logs)
	}
}

// Logs returns all that the process has written so far.
func (p *Process) Logs() string { return p.log.String() }

// Signal sends a signal to the process.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatalf("signal %v: %v", sig, err)
	}
}

// Kill ends the process at once (kill -9) and waits until it is gone. Killing a
// dead process does nothing. The end of the test kills, too.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.dead
}

// Stop asks the process to end (SIGTERM), waits until it is gone and fails the
// test if it was not content. Caddy waits for requests in progress as long as
// its grace_period allows.
func (p *Process) Stop() {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
	if code := p.Wait(); code != 0 {
		p.t.Errorf("caddy: exit code %d, want 0", code)
	}
}

// Load replaces the running config, even by an equal one, and returns the
// admin API's answer: 200 once the new config runs, else an error in the body
// and the old config still runs. When it returns, the admin API is one server.
func (p *Process) Load(t testing.TB, caddyfile string) (status int, body string) {
	t.Helper()
	return p.load(t, "text/caddyfile", caddyfile)
}

// LoadJSON is Load of a config in JSON.
func (p *Process) LoadJSON(t testing.TB, config string) (status int, body string) {
	t.Helper()
	return p.load(t, "application/json", config)
}

func (p *Process) load(t testing.TB, contentType, config string) (status int, body string) {
	t.Helper()
	status, body = p.Ask(t, http.MethodPost, "/load", config,
		"Content-Type", contentType, "Cache-Control", "must-revalidate")
	AwaitHandover(t, p.Admin)
	return status, body
}

// Ask sends a request to the admin API. The header is names and values in turn.
func (p *Process) Ask(t testing.TB, method, path, body string, header ...string) (status int, answer string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+p.Admin+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return do(t, req)
}

// Metrics returns the admin API's /metrics.
func (p *Process) Metrics(t testing.TB) string {
	t.Helper()
	status, body := p.Ask(t, http.MethodGet, "/metrics", "")
	if status != http.StatusOK {
		t.Fatalf("GET /metrics: got %d, want 200\n%s", status, body)
	}
	return body
}

// Wait waits until the process has ended and returns its exit code.
func (p *Process) Wait() int {
	p.t.Helper()
	select {
	case <-p.dead:
	case <-time.After(patience):
		p.Signal(syscall.SIGQUIT) // leaves the stacks of all goroutines in the log
		<-p.dead
		p.t.Fatalf("caddy did not stop within %v", patience)
	}
	return p.cmd.ProcessState.ExitCode()
}

// admin keeps no connections, so that no test finds them left over.
var admin = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true},
	Timeout:   patience,
}

func do(t testing.TB, req *http.Request) (status int, body string) {
	t.Helper()
	resp, err := admin.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}
