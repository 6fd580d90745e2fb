// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"encoding/binary"
	"testing"
	"time"
)

// A reply of admit.lua of any size and with any integers never panics, denies
// only with a limit that says so, and locks nobody out for longer than the limit
// itself ever would.
func FuzzAdmitReply(f *testing.F) {
	reply := func(ints ...int64) (b []byte) {
		for _, n := range ints {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
		return b
	}
	f.Add(reply(1, 1, 5_000_000, 1, 0))
	f.Add(reply(1, 0, 0, 0, 20))
	f.Add(append(reply(1, 1, 5_000_000, 1, 0, 0, 0, 0, 20), 0))
	f.Add(reply(1, 2, 0, 2, 0))
	f.Add(reply(-1<<63, 0, -1<<63, 0, 1<<63-1))
	f.Add(reply(1))
	f.Add(reply())
	limits := []*Limit{rate(f, "rate", 1, time.Minute, 5, 2), concurrency(f, "concurrency", 20, 10*time.Second)}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newRedis(redisAt("127.0.0.1:1"))
		defer r.single.client.Close()
		now := time.Now()
		calls := r.calls(now, []Check{{Limit: limits[0]}, {Limit: limits[1]}}, id("a"), id("b"))
		command := new(admitCommand)
		for _, c := range calls[:1+len(b)%2] { // at first or second place
			command.add(c)
		}
		c := calls[len(b)%2]
		var reply []int64
		for ; len(b) >= 8; b = b[8:] {
			reply = append(reply, int64(binary.LittleEndian.Uint64(b)))
		}
		c.read(now, reply, nil)
		adm := newAdmission(2)
		r.acknowledge(c)
		err := r.conclude(now, c, &adm)
		switch {
		case len(adm.Results) != 2:
			t.Errorf("reply %v: %d results, want 2", reply, len(adm.Results))
		case err != nil && !adm.Allowed:
			t.Errorf("reply %v: %v, and denied", reply, err)
		case !adm.Allowed && adm.Results[0].Outcome != Denied && adm.Results[1].Outcome != Denied:
			t.Errorf("reply %v: denied by no limit: %+v", reply, adm.Results)
		}
		for _, result := range adm.Results {
			if most := 5 * time.Minute; result.RetryAfter < 0 || result.RetryAfter > most || result.Remaining < 0 {
				t.Errorf("reply %v: %+v, want to wait for %v at most", reply, result, most)
			}
		}
		r.Release(adm)
	})
}
