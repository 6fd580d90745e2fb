// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestFakeServer_SetTime(t *testing.T) {
	s := StartFakeTime(t)
	// SetTime itself fails unless TIME agrees exactly.
	epoch := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, offset := range []time.Duration{
		0, time.Microsecond, 999_999 * time.Microsecond, time.Second,
		-time.Microsecond, -1000 * time.Hour, 100_000 * time.Hour,
	} {
		s.SetTime(epoch.Add(offset))
	}
	s.SetTime(epoch.In(time.FixedZone("", -7*3600)))
	start := time.Now()
	for range 2000 {
		s.SetTime(epoch.Add(rand.N(1e6 * time.Second)).Truncate(time.Microsecond))
	}
	t.Logf("one SetTime takes %v", time.Since(start)/2000)
}

func TestFakeServer_KeysExpireOnTheFakeClock(t *testing.T) {
	s := StartFakeTime(t)
	const script = `
		local now = redis.call('TIME')
		return {now[1], now[2], redis.call('PTTL', KEYS[1]), redis.call('EXISTS', KEYS[1])}`
	now := time.UnixMicro(1_790_000_000_000_500)
	s.SetTime(now)
	if err := s.Client().Set(t.Context(), "k", "v", 1500*time.Millisecond).Err(); err != nil {
		t.Fatal(err)
	}
	rows := []struct {
		after time.Duration
		want  []any
	}{
		{0, []any{"1790000000", "500", int64(1500), int64(1)}},
		{500 * time.Microsecond, []any{"1790000000", "1000", int64(1499), int64(1)}},
		{1000 * time.Millisecond, []any{"1790000001", "500", int64(500), int64(1)}},
		{-time.Hour, []any{"1789996400", "500", int64(3601500), int64(1)}},
		// A key lives through the millisecond in which it expires.
		{1500 * time.Millisecond, []any{"1790000001", "500500", int64(0), int64(1)}},
		{1501 * time.Millisecond, []any{"1790000001", "501500", int64(-2), int64(0)}},
	}
	rdb := s.Client()
	for i, row := range rows {
		s.SetTime(now.Add(row.after))
		got, err := rdb.Eval(t.Context(), script, []string{"k"}).Slice()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(row.want, got); diff != "" {
			t.Errorf("row %d, after %v (-want +got):\n%s", i, row.after, diff)
		}
	}
}

func TestFakeServer_SetOffset(t *testing.T) {
	s := StartFakeTime(t, "--appendonly", "yes")
	// SetOffset itself fails unless TIME agrees.
	for _, offset := range []time.Duration{0, 10 * time.Second, 250 * time.Millisecond, -1500 * time.Millisecond, -1000 * time.Hour} {
		s.SetOffset(offset)
	}
	s.Client().Set(t.Context(), "k", "v", 0)
	s.Restart()
	got := s.Client().Time(t.Context()).Val()
	if off := time.Until(got); off < -1001*time.Hour || off > -999*time.Hour {
		t.Errorf("after a restart the clock is off by %v, want as before", off)
	}
	if got := s.Client().Get(t.Context(), "k").Val(); got != "v" {
		t.Errorf("after a restart with its file: got %q, want v", got)
	}
}
