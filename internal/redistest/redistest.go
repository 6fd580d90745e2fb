// SPDX-License-Identifier: Apache-2.0

// Package redistest starts real redis-servers for tests: one of its own for
// each test that asks, on a free port of the loopback interface, with its data
// in a temporary directory, gone when the test ends (or dies).
//
//	srv := redistest.Start(t)
//	rdb := srv.Client()
//
// Where a program is missing the test is skipped; in CI, or with
// STRIPE_RATELIMIT_REQUIRE_REDIS set, it fails: a skipped test proves nothing.
package redistest

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// readyTimeout bounds every wait for a process. It is long because it only ever
// passes when something is broken, and machines that test are busy.
const readyTimeout = 30 * time.Second

// Server is a redis-server process. Its methods fail the test that started it.
type Server struct {
	// Addr is where it listens: host:port, or the path of a Unix socket.
	Addr string

	// Args is what the process was started with; Restart reads it.
	Args []string

	// CAFile, CertFile and KeyFile are PEM files of a server made by StartTLS:
	// the authority that signed its certificate and a client's pair.
	CAFile, CertFile, KeyFile string

	t    testing.TB
	port int // 0 for a Unix socket
	env  []string
	tls  *tls.Config
	cmd  *exec.Cmd
	dead chan struct{} // closed once the process has been reaped
	log  *Output
}

// Start starts a redis-server that keeps nothing on disk and stops it when the
// test ends. The args follow its own and win over them ("--maxmemory", "1mb").
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t)
	s.startOnFreePort("--port", args...)
	return s
}

// newServer returns a server that is not running yet.
func newServer(t testing.TB) *Server {
	t.Helper()
	need(t, "redis-server")
	s := &Server{t: t, log: new(Output)}
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() {
			log := s.log.String()
			t.Logf("redis-server %s, end of its log:\n%s", s.Addr, log[max(0, len(log)-1500):])
		}
	})
	return s
}

// need skips the test if a program is missing, or fails it in CI.
func need(t testing.TB, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		missing(t, program+" is not on the PATH")
	}
}

func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") != "" || os.Getenv("STRIPE_RATELIMIT_REQUIRE_REDIS") != "" {
		t.Fatalf("%s, and this run must not skip tests", what)
	}
	t.Skipf("%s; skipping a test that needs a real Redis", what)
}

// startOnFreePort starts the server on a free port, which it is told by option.
func (s *Server) startOnFreePort(option string, args ...string) {
	s.t.Helper()
	dir := s.t.TempDir()
	s.tryPorts(func() error {
		return s.start(dir, append([]string{option, strconv.Itoa(s.port)}, args...)...)
	})
}

// tryPorts calls start with a free port set, and with another one if somebody
// else was faster.
func (s *Server) tryPorts(start func() error) {
	s.t.Helper()
	for range 5 {
		s.port = FreePort(s.t)
		s.Addr = "127.0.0.1:" + strconv.Itoa(s.port)
		err := start()
		if err == nil {
			return
		}
		if !errors.Is(err, errPortTaken) {
			s.t.Fatalf("start redis-server: %v\n%s", err, s.log)
		}
	}
	s.t.Fatalf("start redis-server: no free port\n%s", s.log)
}

func (s *Server) start(dir string, args ...string) error {
	s.Args = append([]string{
		"--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", dir,
	}, args...)
	return s.run()
}

var (
	errPortTaken = errors.New("port is taken")
	errExited    = errors.New("process exited")
	errNotReady  = errors.New("process does not answer")
)

// run starts the process and waits until it answers.
func (s *Server) run() error {
	s.log.Reset()
	cmd := exec.Command("redis-server", s.Args...)
	cmd.Stdout, cmd.Stderr = s.log, s.log
	cmd.Env = append(os.Environ(), s.env...)
	TieToParent(cmd)
	if err := cmd.Start(); err != nil {
		return err
	}
	dead := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(dead)
	}()
	s.cmd, s.dead = cmd, dead

	pid := "process_id:" + strconv.Itoa(cmd.Process.Pid) + "\r\n"
	for deadline := time.Now().Add(readyTimeout); time.Now().Before(deadline); {
		select {
		case <-dead:
			if strings.Contains(s.log.String(), "Address already in use") {
				return errPortTaken
			}
			return errExited
		case <-time.After(2 * time.Millisecond):
		}
		info, err := s.info("server")
		switch {
		case err == nil && strings.Contains(info, pid):
			return nil
		case err == nil:
			s.Kill() // another server answered: ours will not get the port
			return errPortTaken
		case strings.HasPrefix(err.Error(), "NOAUTH"), strings.HasPrefix(err.Error(), "NOPERM"):
			return nil // as the args want it
		}
	}
	s.Kill()
	return errNotReady
}

// info returns a section of INFO. It asks over a connection of its own and
// without HELLO, so it leaves no trace but one INFO in the server's statistics.
func (s *Server) info(section string) (string, error) {
	conn, err := s.dial()
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(readyTimeout))
	if _, err := conn.Write([]byte("INFO " + section + "\r\n")); err != nil {
		return "", err
	}
	r := bufio.NewReader(conn)
	head, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	n, err := strconv.Atoi(strings.TrimSpace(head[1:]))
	if head[0] != '$' || err != nil {
		return "", errors.New(strings.TrimSpace(head[1:]))
	}
	body := make([]byte, n)
	_, err = io.ReadFull(r, body)
	return string(body), err
}

func (s *Server) dial() (net.Conn, error) {
	network := "tcp"
	if s.port == 0 {
		network = "unix"
	}
	if s.tls != nil {
		return tls.Dial(network, s.Addr, s.tls)
	}
	return net.Dial(network, s.Addr)
}

var noMaintenance = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}

// Client returns a new client, which never retries and is closed when the test
// ends.
func (s *Server) Client() *redis.Client {
	opts := &redis.Options{
		Addr:      s.Addr,
		Protocol:  2,
		TLSConfig: s.tls,
		// Retries would hide what a test wants to see, the others add commands
		// of their own to what it counts.
		MaxRetries:               -1,
		DialerRetries:            1,
		DisableIdentity:          true,
		MaintNotificationsConfig: noMaintenance,
	}
	if s.port == 0 {
		opts.Network = "unix"
	}
	rdb := redis.NewClient(opts)
	s.t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// do sends a command and returns its reply as text.
func (s *Server) do(args ...any) string {
	s.t.Helper()
	rdb := s.Client()
	defer rdb.Close()
	reply, err := rdb.Do(s.t.Context(), args...).Result()
	if err != nil {
		s.t.Fatalf("redis-server %s: %v: %v", s.Addr, args, err)
	}
	return fmt.Sprint(reply)
}

// wait waits until a process is where it must be: it looks again and again, for
// nothing else tells.
func (s *Server) wait(what string, done func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(readyTimeout); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("redis-server %s: %s did not happen within %v", s.Addr, what, readyTimeout)
		}
	}
}

// waitForSync waits until a replica has what its master has.
func (s *Server) waitForSync() {
	s.t.Helper()
	s.wait("sync with the master", func() bool {
		return strings.Contains(s.do("INFO", "replication"), "master_link_status:up")
	})
}

// Kill ends the process at once, as a crash does, and waits until it is gone.
// Killing a dead server does nothing.
func (s *Server) Kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	<-s.dead
}

// Stop freezes the process (SIGSTOP): connections stay open and nothing
// answers. When it returns no thread of the process is running any more.
func (s *Server) Stop() {
	s.t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		s.t.Fatalf("stop redis-server: %v", err)
	}
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(s.cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || !status.Stopped() {
			s.t.Fatalf("stop redis-server: %v, status %#x", err, status)
		}
		return
	}
}

// Cont lets a stopped process go on. It executes what was sent meanwhile.
func (s *Server) Cont() {
	s.t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		s.t.Fatalf("continue redis-server: %v", err)
	}
}

// Restart kills the process, if it still runs, and starts it again at the same
// address with the same Args: without its data, unless Args say otherwise.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	if err := s.run(); err != nil {
		s.t.Fatalf("restart redis-server on %s: %v\n%s", s.Addr, err, s.log)
	}
}

// Commands returns how often each command was called since the server started
// or CONFIG RESETSTAT, by INFO's lower-case names ("evalsha", "config|get").
// Commands that scripts call are counted, too, the HELLO of every connection of
// a client, and the INFO of Start and of earlier calls.
func (s *Server) Commands(t testing.TB) map[string]int64 {
	t.Helper()
	info, err := s.info("commandstats")
	if err != nil {
		t.Fatalf("INFO commandstats: %v", err)
	}
	calls := make(map[string]int64)
	for line := range strings.Lines(info) {
		// cmdstat_get:calls=2,usec=3,usec_per_call=1.50,rejected_calls=0,failed_calls=0
		name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if !ok {
			continue
		}
		n, _, _ := strings.Cut(rest, ",")
		if calls[name], err = strconv.ParseInt(n, 10, 64); err != nil {
			t.Fatalf("INFO commandstats: %q: %v", line, err)
		}
	}
	return calls
}
