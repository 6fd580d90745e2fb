// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// FakeServer is a redis-server whose wall clock stands still until SetTime moves
// it, to the microsecond and in either direction, or runs from SetOffset on: TIME,
// the expiry of keys and PTTL follow it, inside scripts and outside. Its timers
// run on real time.
type FakeServer struct {
	*Server

	file string // what the process takes for the time, read at every look
	rdb  *redis.Client
}

// StartFakeTime starts a redis-server under libfaketime, with its clock at the
// start of 2026.
func StartFakeTime(t testing.TB, args ...string) *FakeServer {
	t.Helper()
	need(t, "redis-server")
	s := &FakeServer{Server: newServer(t), file: filepath.Join(t.TempDir(), "time")}
	s.env = append(preload(t),
		"TZ=UTC", // the file's
		"FAKETIME_TIMESTAMP_FILE="+s.file,
		"FAKETIME_NO_CACHE=1",
		"DONT_FAKE_MONOTONIC=1", // else the event loop would stand still, too
	)
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s.write(start)
	s.startOnFreePort("--port", args...)
	s.unshare()
	s.rdb = s.Client()
	s.SetTime(start)
	return s
}

// unshare removes what libfaketime would share with child processes and leaves
// behind when it is killed. Only its names are needed no more.
func (s *FakeServer) unshare() {
	shared, _ := filepath.Glob("/dev/shm/*faketime_s*_" + strconv.Itoa(s.cmd.Process.Pid))
	for _, name := range shared {
		_ = os.Remove(name)
	}
}

// Restart is that of Server; the clock goes on as it was set.
func (s *FakeServer) Restart() {
	s.t.Helper()
	s.Server.Restart()
	s.unshare()
}

// SetTime sets the server's clock, which has microseconds, and makes sure that
// the server sees just that time.
func (s *FakeServer) SetTime(now time.Time) {
	s.t.Helper()
	s.write(now)
	got, err := s.rdb.Time(s.t.Context()).Result()
	if err != nil {
		s.t.Fatalf("TIME: %v", err)
	}
	if want := now.Truncate(time.Microsecond); !got.Equal(want) {
		s.t.Fatalf("TIME: got %v, want %v", got.UTC(), want.UTC())
	}
}

// SetOffset lets the server's clock run, so far ahead of this machine's (behind,
// if it is negative), and makes sure that the server sees it.
func (s *FakeServer) SetOffset(ahead time.Duration) {
	s.t.Helper()
	s.replace(fmt.Sprintf("%+.6f", ahead.Seconds()))
	before := time.Now().Add(ahead - time.Millisecond)
	got, err := s.rdb.Time(s.t.Context()).Result()
	if err != nil {
		s.t.Fatalf("TIME: %v", err)
	}
	if after := time.Now().Add(ahead + time.Millisecond); got.Before(before) || got.After(after) {
		s.t.Fatalf("TIME: got %v, want it between %v and %v", got, before, after)
	}
}

func (s *FakeServer) write(now time.Time) {
	s.t.Helper()
	// The middle of the microsecond: libfaketime reads the fraction as a float
	// and cuts.
	s.replace(now.UTC().Format("2006-01-02 15:04:05.000000") + "5")
}

// replace replaces the file as a whole: the server may look at any moment, and
// takes an empty or torn one for the real time.
func (s *FakeServer) replace(text string) {
	s.t.Helper()
	if err := os.WriteFile(s.file+".new", []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(s.file+".new", s.file); err != nil {
		s.t.Fatal(err)
	}
}

// preload returns the environment that loads libfaketime into a process.
func preload(t testing.TB) []string {
	t.Helper()
	for _, pattern := range []string{
		"/usr/lib/*/faketime/libfaketime.so.1",          // Debian
		"/usr/lib*/faketime/libfaketime.so.1",           // Fedora, Arch
		"/usr/local/lib/faketime/libfaketime.so.1",      // from source
		"/opt/homebrew/lib/faketime/libfaketime.*dylib", // Homebrew
		"/usr/local/lib/faketime/libfaketime.*dylib",
	} {
		libs, _ := filepath.Glob(pattern)
		if len(libs) == 0 {
			continue
		}
		if runtime.GOOS == "darwin" {
			return []string{"DYLD_INSERT_LIBRARIES=" + libs[0], "DYLD_FORCE_FLAT_NAMESPACE=1"}
		}
		// libc's malloc must come before the jemalloc that Debian links Redis
		// with: that one looks at the clock while libfaketime, for its first
		// look at the clock, allocates.
		return []string{"LD_PRELOAD=" + libs[0] + ":libc.so.6"}
	}
	missing(t, "libfaketime is not installed")
	return nil
}
