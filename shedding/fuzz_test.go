// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"encoding/binary"
	"testing"
	"time"
)

// A reply of fleet_sync.lua of any size and with any integers is refused or
// leaves an instance that asks again within the hour, at sane numbers.
func FuzzSyncReply(f *testing.F) {
	reply := func(ints ...int64) (b []byte) {
		for _, n := range ints {
			b = binary.LittleEndian.AppendUint64(b, uint64(n))
		}
		return b
	}
	f.Add(reply(1e15, 5, 5, 250_000, 10_000, 1, 1, 10, 8, 8, 1, 1, 4, 2, 0, 0))
	f.Add(reply(1e15, -5, -5, -250_000, -10_000, 1, 1, 10, 8, 8, 1, 1, 4, 2, 0, 0))
	f.Add(reply(1e15, 1<<62, 1<<62, 1<<62, 1<<62, 1, 1, 1<<62, 1<<62, 1<<62, 1, 1, 4, -2, 0, 0))
	f.Add(reply(-1 << 63))
	f.Add(reply())
	f.Fuzz(func(t *testing.T, b []byte) {
		var ints []int64
		for ; len(b) >= 8; b = b[8:] {
			ints = append(ints, int64(binary.LittleEndian.Uint64(b)))
		}
		r, err := ParseSyncReply(ints)
		if err != nil {
			return
		}
		now := time.Unix(1e9, 0)
		s := share{settings: FleetSettings{Capacity: 10, Reserve: 20}}
		s.reply(s.request(now, 1), now, now, r, 0.5)
		if beat := s.nextBeat(0.999); beat < 0 || beat > 2*time.Hour {
			t.Errorf("reply %v: the next beat is in %v", ints, beat)
		}
		if s.holdUntil.After(now.Add(2 * time.Hour)) {
			t.Errorf("reply %v: nobody asks before %v", ints, s.holdUntil)
		}
		s.take(now, Get)
		s.takeUnclaimed(now, Get)
		later := s.end.Add(time.Second)
		if next := s.request(later, 1); next.Held < 0 || next.Wanted < 1 || s.live(later) != 0 {
			t.Errorf("reply %v: the next request is %+v, and %d slots stand, want sane numbers and none", ints, next, s.live(later))
		}
	})
}
