// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// admin returns what the admin API says. Without connections that stay, so that
// none is found left over.
func (c *caddy) admin(t testing.TB, path string) string {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	resp, err := client.Get("http://" + c.process.Admin + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: got %d %v, want 200", path, resp.StatusCode, err)
	}
	return string(body)
}

// metric adds up the series of a metric.
func (c *caddy) metric(t testing.TB, name string) int {
	t.Helper()
	sum, found := 0.0, false
	for line := range strings.Lines(c.process.Metrics(t)) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		value := rest[strings.LastIndexByte(rest, ' ')+1:]
		n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			t.Fatalf("metric %q: %v", line, err)
		}
		sum, found = sum+n, true
	}
	if !found {
		t.Fatalf("there is no metric %s", name)
	}
	return int(sum)
}

var heapAlloc = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)$`)

// heap returns the bytes on the heap after a garbage collection.
func (c *caddy) heap(t testing.TB) (bytes int) {
	t.Helper()
	for range 2 { // what has a finalizer, or is in a sync.Pool, goes with the second
		m := heapAlloc.FindStringSubmatch(c.admin(t, "/debug/pprof/heap?gc=1&debug=1"))
		if m == nil {
			t.Fatal("there is no HeapAlloc")
		}
		bytes, _ = strconv.Atoi(m[1])
	}
	return bytes
}

// stored counts the keys in Redis, those apart that only have leases which have
// ended: they are purged with the next lease that is taken, or after an hour.
func (s *soak) stored() (live, dead int) {
	reply := s.command("EVAL", `
		local time = redis.call('TIME')
		local live, dead = 0, 0
		for _, key in ipairs(redis.call('KEYS', '*')) do
			if string.find(key, ':c:', 1, true) and redis.call('ZCOUNT', key, time[1] * 1000000 + time[2], '+inf') == 0 then
				dead = dead + 1
			else
				live = live + 1
			end -- of a key
		end
		return {live, dead}`, 0).([]any)
	return int(reply[0].(int64)), int(reply[1].(int64))
}

var usedMemory = regexp.MustCompile(`(?m)^used_memory:(\d+)`)

// memory returns the bytes that Redis uses.
func (s *soak) memory() (bytes int) {
	m := usedMemory.FindStringSubmatch(s.command("INFO", "memory").(string))
	if m == nil {
		s.t.Fatal("there is no used_memory")
	}
	bytes, _ = strconv.Atoi(m[1])
	return bytes
}
