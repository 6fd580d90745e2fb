// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

var fleetKeys = []string{"test:{pool}:fleet", "test:{pool}:fleet:ends"}

// redisSync runs the script; it is all that it takes to bring a Fleet to Redis.
func redisSync(rdb redis.Scripter) SyncFunc {
	script := redis.NewScript(lua.FleetSync)
	return func(ctx context.Context, request SyncRequest) (SyncReply, error) {
		reply, err := script.Run(ctx, rdb, fleetKeys, request.Args()...).Int64Slice()
		if err != nil {
			return SyncReply{}, fmt.Errorf("fleet sync: %w", err)
		}
		return ParseSyncReply(reply)
	}
}

// The header is what those read who run the script by hand.
func TestFleetSync_HeaderIsTrue(t *testing.T) {
	header, body, _ := strings.Cut(lua.FleetSync, "\nlocal ")
	count := func(pattern string) int { return len(regexp.MustCompile(pattern).FindAllString(header, -1)) }
	if got, want := count(`(?m)^-- KEYS\[\d+\]`), len(fleetKeys); got != want {
		t.Errorf("%d keys in the header, want %d", got, want)
	}
	if got, want := count(`(?m)^-- ARGV\[\d+\]`), len(SyncRequest{}.Args()); got != want {
		t.Errorf("%d arguments in the header, want %d", got, want)
	}
	if got := count(`(?m)^--   reply\[\d+\]`); got != replySize {
		t.Errorf("%d integers of the reply in the header, want %d", got, replySize)
	}
	// The names by which the script knows its arguments are those of the header.
	names := regexp.MustCompile(`(?m)^-- ARGV\[(\d+)\] (\w+)`).FindAllStringSubmatch(header, -1)
	for _, name := range names[1:] {
		local := regexp.MustCompile(`(?m)^local ` + name[2] + ` +=.*ARGV\[` + name[1] + `\]`)
		if name[2] != "instance" && !local.MatchString(body) {
			t.Errorf("argument %s is not read as %s", name[1], name[2])
		}
	}
}

func id(name string) string { return fmt.Sprintf("%032x", name) }

// scriptTest runs syncs on a Redis whose clock the test sets.
type scriptTest struct {
	*testing.T
	redis *redistest.FakeServer
	rdb   *redis.Client
	sync  SyncFunc
	start time.Time
}

func newScriptTest(t *testing.T) *scriptTest {
	s := redistest.StartFakeTime(t)
	rdb := s.Client()
	return &scriptTest{t, s, rdb, redisSync(rdb), time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
}

func (t *scriptTest) at(d time.Duration) { t.redis.SetTime(t.start.Add(d)) }

func (t *scriptTest) do(r SyncRequest) SyncReply {
	t.Helper()
	reply, err := t.sync(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return reply
}

// row is a sync and what of its reply matters: claim, and fleet totals.
type row struct {
	at      time.Duration
	who     string
	request SyncRequest
	want    string // claim, sum of claims / allocation, instances; "ignored"
	why     string
}

// play runs the rows, each with the sequence number one above the last.
func (t *scriptTest) play(capacity int64, reserve int64, rows []row) {
	t.Helper()
	sequence := int64(0)
	for i, row := range rows {
		t.at(row.at)
		sequence++
		r := row.request
		r.Instance = id(row.who)
		if r.Sequence == 0 {
			r.Sequence = sequence
		}
		if r.Capacity == 0 && r.Generation == 0 {
			r.Capacity, r.Reserve = capacity, reserve
		}
		r.Wanted = max(r.Wanted, r.Need, r.Held)
		reply := t.do(r)
		got := "ignored"
		if !reply.Ignored {
			claim := fmt.Sprint(reply.Claim)
			if reply.Limit != reply.Claim {
				claim += fmt.Sprint(">", reply.Limit)
			}
			got = fmt.Sprintf("%s, %d/%d, %d", claim, reply.Claims, reply.Allocation, reply.Instances)
		}
		if reply.Warm {
			got += " warm"
		}
		if reply.Drift > 0 {
			got += fmt.Sprintf(" drift %d", reply.Drift)
		}
		if got != row.want {
			t.Fatalf("row %d, %s at %v (%s): got %q, want %q", i, row.who, row.at, row.why, got, row.want)
		}
	}
}

const ms = time.Millisecond

func TestFleetSync_Claims(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Need: 0, Wanted: 1}, "1, 1/80, 1", "a new instance gets headroom"},
		{1 * ms, "a", SyncRequest{Held: 1, Need: 30, Wanted: 60}, "60, 60/80, 1", "more, with headroom"},
		{2 * ms, "b", SyncRequest{Need: 5, Wanted: 30}, "5, 65/80, 2", "headroom ends at four fifths, 64"},
		{3 * ms, "b", SyncRequest{Held: 5, Need: 40}, "20, 80/80, 2", "what is needed gets what is left"},
		{4 * ms, "c", SyncRequest{Need: 1}, "0, 80/80, 3", "none left"},
		{5 * ms, "a", SyncRequest{Held: 30, Need: 30}, "30>29, 50/80, 3", "a hands back; c is still short of one, so it has to give it up"},
		{6 * ms, "c", SyncRequest{Need: 1}, "1, 51/80, 3", "now there is room"},
		{7 * ms, "b", SyncRequest{Held: 20, Need: 9}, "20>19, 51/80, 3", "a claim is kept while it is held"},
		{8 * ms, "b", SyncRequest{Held: 20, Need: 9, Sequence: 2}, "ignored", "an older sync that comes late"},
		{9 * ms, "b", SyncRequest{Held: 9, Need: 9, Leave: true}, "0, 31/80, 2", "b goes"},
		{10 * ms, "c", SyncRequest{Held: 0, Need: 2}, "2, 32/80, 2", "c never got the reply that gave it 1"},
	})
}

func TestFleetSync_Deadline(t *testing.T) {
	s := newScriptTest(t)
	now := s.start.UnixMicro()
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Need: 1, Deadline: now + 1}, "1, 1/80, 1", "in time"},
		{0, "a", SyncRequest{Need: 2, Deadline: now}, "ignored", "too late"},
		{0, "b", SyncRequest{Need: 2, Deadline: now - 1}, "ignored", "too late, and no entry is made"},
		{1 * ms, "a", SyncRequest{Held: 1, Need: 1}, "1, 1/80, 1", ""},
	})
	if r := s.do(SyncRequest{Instance: id("a"), Deadline: 1, Sequence: 99}); r.Now != now+1000 {
		t.Errorf("an ignored sync is told %d as the time, want %d", r.Now, now+1000)
	}
}

func TestFleetSync_DropsTheDead(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Need: 50, InFlight: 50, Critical: 3, Workers: 7}, "50, 50/80, 1", ""},
		{1000 * ms, "b", SyncRequest{Need: 80}, "30, 80/80, 2", ""},
		{1999 * ms, "b", SyncRequest{Held: 30, Need: 80}, "30, 80/80, 2", "a is silent, but not for eight beats"},
		{2000 * ms, "b", SyncRequest{Held: 30, Need: 80}, "80, 80/80, 1", "now its claim is free"},
		{2100 * ms, "a", SyncRequest{Held: 0, Need: 50, InFlight: 50, Epoch: 1}, "0, 80/80, 2", "it returns as a new one"},
		{9000 * ms, "c", SyncRequest{Need: 1}, "1, 1/80, 1", "all the others have died"},
	})
	if r := s.do(SyncRequest{Instance: id("c"), Sequence: 99, Held: 1, Capacity: 100, Reserve: 2000}); r.InFlight != 0 || r.Critical != 0 || r.Workers != 0 {
		t.Errorf("totals after the dead were dropped: %+v, want none", r)
	}
}

func TestFleetSync_DropsAtMost32(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	for i := range 100 {
		s.do(SyncRequest{Instance: id(fmt.Sprint("dead", i)), Sequence: 1, Need: 1, Wanted: 1, Capacity: 200})
	}
	for i, want := range []string{"0 of 69", "0 of 37", "0 of 5", "5 of 1"} {
		s.at(3*time.Second + time.Duration(i)*ms)
		r := s.do(SyncRequest{Instance: id("a"), Sequence: int64(i + 1), Need: 5, Wanted: 5, Capacity: 200})
		if got := fmt.Sprintf("%d of %d", r.Claim, r.Instances); got != want {
			t.Errorf("sync %d: claim and instances: got %q, want %q", i, got, want)
		}
	}
}

func TestFleetSync_ConfigurationNewestWins(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	sequence := int64(0)
	do := func(who string, generation, capacity, held int64) SyncReply {
		sequence++
		return s.do(SyncRequest{Instance: id(who), Sequence: sequence, Generation: generation, Capacity: capacity, Reserve: 2000, Held: held, Wanted: held})
	}
	first := do("a", 0, 100, 0)
	if same := do("b", 0, 100, 0); same.Generation != first.Generation {
		t.Errorf("the same numbers: generation %d, want %d", same.Generation, first.Generation)
	}
	second := do("b", 0, 200, 0)
	if second.Generation <= first.Generation || second.Allocation != 160 {
		t.Errorf("new numbers: %+v, want a generation above %d and 160", second, first.Generation)
	}
	if old := do("a", first.Generation, 100, 0); old.Allocation != 160 || old.Generation != second.Generation {
		t.Errorf("the old configuration is back: %+v", old)
	}
	s.rdb.FlushAll(t.Context())
	s.at(time.Second)
	if old := do("a", first.Generation, 100, 0); old.Allocation != 80 {
		t.Errorf("after a loss the only one that reports has 80, got %+v", old)
	}
	if got := do("b", second.Generation, 200, 0); got.Allocation != 160 {
		t.Errorf("the newest is back: %+v, want 160", got)
	}
	if got := do("a", 0, 300, 0); got.Allocation != 240 || got.Generation <= second.Generation {
		t.Errorf("and a newer still: %+v, want 240", got)
	}
}

func TestFleetSync_LessCapacity(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Need: 40}, "40, 40/80, 1", ""},
		{1 * ms, "b", SyncRequest{Need: 40}, "40, 80/80, 2", ""},
		{2 * ms, "b", SyncRequest{Held: 40, Need: 40, Capacity: 50, Reserve: 2000}, "40>20, 80/40, 2", "told to go down; the claim stays its own until it has"},
		{3 * ms, "c", SyncRequest{Need: 1, Capacity: 50, Reserve: 2000}, "0, 80/40, 3", "no grants meanwhile"},
		{4 * ms, "b", SyncRequest{Held: 20, Need: 40, Capacity: 50, Reserve: 2000}, "20>13, 60/40, 3", "it has, and has to go on"},
		{5 * ms, "a", SyncRequest{Held: 40, Need: 40, Capacity: 50, Reserve: 2000}, "40>26, 60/40, 3", ""},
		{6 * ms, "a", SyncRequest{Held: 26, Need: 40, Capacity: 50, Reserve: 2000}, "26>22, 46/40, 3", ""},
		{7 * ms, "b", SyncRequest{Held: 13, Need: 40, Capacity: 50, Reserve: 2000}, "13>12, 39/40, 3", "there is room again, but not for the rich"},
		{8 * ms, "c", SyncRequest{Need: 1, Capacity: 50, Reserve: 2000}, "1, 40/40, 3", "while somebody has nothing"},
		{9 * ms, "a", SyncRequest{Held: 22, Need: 40, Capacity: 50, Reserve: 10000}, "22>0, 36/0, 3", "a reserve of everything"},
	})
}

// Who came first must not keep everything.
func TestFleetSync_RichAndPoor(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Need: 80}, "80, 80/80, 1", ""},
		{1 * ms, "a", SyncRequest{Held: 80, Need: 90}, "80, 80/80, 1", "want alone makes nobody poor that has the most"},
		{2 * ms, "b", SyncRequest{Need: 40}, "0, 80/80, 2", ""},
		{3 * ms, "a", SyncRequest{Held: 80, Need: 90}, "80>70, 80/80, 2", "an eighth of what is between"},
		{13 * ms, "a", SyncRequest{Held: 72, Need: 90}, "72>63, 72/80, 2", "it gives up what has become free, and does not grow"},
		{14 * ms, "b", SyncRequest{Need: 40}, "8, 80/80, 2", ""},
		{15 * ms, "a", SyncRequest{Held: 72, Need: 90}, "72>63, 80/80, 2", "b has some, but had none a moment ago"},
		{20 * ms, "a", SyncRequest{Held: 10, Need: 41}, "10>9, 18/80, 2", ""},
		{23 * ms, "a", SyncRequest{Held: 9, Need: 41}, "41, 49/80, 2", "two holds after the last want nobody is poor"},
	})
}

func TestFleetSync_Auto(t *testing.T) {
	s := newScriptTest(t)
	rows := []struct {
		at      time.Duration
		who     string
		workers int64
		leave   bool
		want    int64 // capacity
		why     string
	}{
		{0, "a", 64, false, 64, ""},
		{0, "b", 64, false, 128, "rises at once"},
		{100 * ms, "c", 32, false, 160, ""},
		{200 * ms, "c", 0, true, 160, "falls late, even for one that has withdrawn"},
		{2000 * ms, "a", 64, false, 160, ""},
		{3500 * ms, "a", 64, false, 160, "b is dropped"},
		{5000 * ms, "a", 64, false, 160, ""},
		{6500 * ms, "a", 64, false, 160, ""},
		{8000 * ms, "a", 64, false, 160, ""},
		{9500 * ms, "a", 64, false, 160, ""},
		{10200 * ms, "a", 64, false, 128, "ten seconds without c"},
		{11500 * ms, "a", 64, false, 128, ""},
		{13000 * ms, "a", 64, false, 128, ""},
		{14500 * ms, "a", 64, false, 128, ""},
		{16000 * ms, "a", 64, false, 128, ""},
		{17500 * ms, "a", 64, false, 128, ""},
		{19000 * ms, "b", 64, false, 128, "b is back in time"},
		{20500 * ms, "a", 64, false, 128, ""},
		{20500 * ms, "b", 10, false, 128, "with less"},
		{22000 * ms, "a", 64, false, 128, ""},
		{22000 * ms, "b", 10, false, 128, ""},
		{23000 * ms, "a", 100, false, 128, ""},
		{23000 * ms, "b", 30, false, 130, "enough again"},
	}
	for i, row := range rows {
		s.at(row.at)
		r := s.do(SyncRequest{Instance: id(row.who), Sequence: int64(i + 1), Workers: row.workers, Leave: row.leave, Reserve: 2000})
		if r.Capacity != row.want || r.Allocation != row.want*8/10 {
			t.Fatalf("row %d, %s at %v (%s): capacity %d, allocation %d, want %d", i, row.who, row.at, row.why, r.Capacity, r.Allocation, row.want)
		}
	}
}

func TestFleetSync_StateLost(t *testing.T) {
	s := newScriptTest(t)
	s.at(-time.Hour)
	before := s.do(SyncRequest{Instance: id("a"), Sequence: 1, Capacity: 100, Reserve: 2000}).Epoch
	s.rdb.FlushAll(t.Context())
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Epoch: before, Sum: 75, Held: 30, Need: 50, Wanted: 70}, "35, 35/80, 1 warm", "back to what it held, and what was free then"},
		{10 * ms, "new", SyncRequest{Need: 1}, "0, 35/80, 2 warm", "a new one has to wait"},
		{200 * ms, "b", SyncRequest{Epoch: before, Sum: 75, Held: 45, Need: 50, Wanted: 60}, "45, 80/80, 3 warm", "its slots were kept for it"},
		{300 * ms, "b", SyncRequest{Epoch: before, Held: 20, Need: 20}, "20, 55/80, 3 warm", ""},
		{499 * ms, "a", SyncRequest{Epoch: before, Held: 35, Need: 50}, "50, 70/80, 3 warm", "which is free now"},
		{500 * ms, "a", SyncRequest{Epoch: before, Held: 50, Need: 55}, "55, 75/80, 3", "two beats later all is as ever"},
		{1000 * ms, "back", SyncRequest{Epoch: before, Held: 0, Need: 1}, "1, 76/80, 4", "a late one opens no second warm-up"},
	})

	// A new instance that comes first cannot know. Whoever remembers tells.
	s.rdb.FlushAll(t.Context())
	s.play(100, 2000, []row{
		{60_000 * ms, "new", SyncRequest{Need: 1}, "1, 1/80, 1", "a fleet starts without delay"},
		{60_010 * ms, "a", SyncRequest{Epoch: before, Sum: 80, Held: 80, Need: 80}, "79, 80/80, 2 warm", ""},
		{60_020 * ms, "new", SyncRequest{Held: 1, Need: 9}, "1, 80/80, 2 warm", ""},
	})

	// Claims that had ended while Redis was away are nobody's.
	s.rdb.FlushAll(t.Context())
	s.play(100, 2000, []row{
		{120_000 * ms, "a", SyncRequest{Epoch: before, Held: 0, Need: 35}, "35, 35/80, 1 warm", ""},
		{120_010 * ms, "b", SyncRequest{Epoch: before, Held: 0, Need: 60}, "45, 80/80, 2 warm", ""},
	})
}

// One of the two keys is deleted, or goes back to what it was.
func TestFleetSync_HalfOfTheStateLost(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	epoch := s.do(SyncRequest{Instance: id("a"), Sequence: 1, Capacity: 100, Reserve: 2000, Need: 10, Wanted: 10}).Epoch
	s.do(SyncRequest{Instance: id("b"), Sequence: 1, Capacity: 100, Reserve: 2000, Need: 10, Wanted: 10})
	s.rdb.Del(t.Context(), fleetKeys[1])
	a := SyncRequest{Epoch: epoch, Held: 10, Need: 20}
	s.play(100, 2000, []row{
		{1 * ms, "x", SyncRequest{Need: 1}, "1, 21/80, 3", "the sorted set is built anew"},
		{2000 * ms, "a", a, "20, 31/80, 3", "b lives as long as if it had synced then"},
		{2001 * ms, "a", SyncRequest{Epoch: epoch, Held: 20, Need: 20}, "20, 20/80, 1", ""},
	})
	s.rdb.Del(t.Context(), fleetKeys[0])
	s.play(100, 2000, []row{
		{2500 * ms, "a", SyncRequest{Epoch: epoch, Sum: 70, Held: 20, Need: 40}, "30, 30/80, 1 warm", "the hash"},
	})
	if members := s.rdb.ZRange(t.Context(), fleetKeys[1], 0, -1).Val(); len(members) != 1 {
		t.Errorf("sorted set: %v, want one instance", members)
	}

	// A replica that lagged behind: it has the epoch, and an older claim.
	dump := s.rdb.Dump(t.Context(), fleetKeys[0]).Val()
	s.play(100, 2000, []row{{5000 * ms, "a", SyncRequest{Epoch: epoch, Sequence: 10, Held: 0, Need: 60}, "60, 60/80, 1", ""}})
	s.rdb.RestoreReplace(t.Context(), fleetKeys[0], time.Minute, dump)
	s.play(100, 2000, []row{
		{5001 * ms, "a", SyncRequest{Epoch: epoch, Sequence: 11, Sum: 80, Held: 60, Need: 70}, "60, 60/80, 1 warm", "back to what it held"},
	})
}

func TestFleetSync_RebuildsTotals(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Need: 10}, "10, 10/80, 1", ""},
		{0, "b", SyncRequest{Need: 10}, "10, 20/80, 2", ""},
	})
	s.rdb.HIncrBy(t.Context(), fleetKeys[0], "claims", 60)
	s.play(100, 2000, []row{
		{1000 * ms, "a", SyncRequest{Sequence: 10, Held: 10, Need: 11}, "10, 80/80, 2", ""},
		{1000 * ms, "b", SyncRequest{Sequence: 10, Held: 10, Need: 11}, "10, 80/80, 2", ""},
	})
	for i := range 8 { // stay alive
		for _, who := range []string{"a", "b"} {
			s.at(time.Duration(2000+1000*i) * ms)
			s.do(SyncRequest{Instance: id(who), Sequence: int64(20 + i), Held: 10, Wanted: 10, Capacity: 100, Reserve: 2000})
		}
	}
	s.play(100, 2000, []row{
		{10_000 * ms, "a", SyncRequest{Sequence: 30, Held: 10, Need: 11}, "11, 21/80, 2 drift 60", "every ten seconds"},
		{10_001 * ms, "b", SyncRequest{Sequence: 30, Held: 10, Need: 11}, "11, 22/80, 2", ""},
	})
}

func TestFleetSync_ServerClockSteps(t *testing.T) {
	s := newScriptTest(t)
	hour := time.Hour
	s.play(100, 2000, []row{
		{hour, "a", SyncRequest{Need: 10}, "10, 10/80, 1", ""},
		{hour, "dead", SyncRequest{Need: 10}, "10, 20/80, 2", ""},
		{0, "a", SyncRequest{Held: 10, Need: 10}, "10, 20/80, 2", "back by an hour"},
		{1000 * ms, "a", SyncRequest{Held: 10, Need: 10}, "10, 20/80, 2", ""},
		{2000 * ms, "a", SyncRequest{Held: 10, Need: 10}, "10, 10/80, 1", "the dead one lives eight beats, not an hour"},
		{2000 * ms, "b", SyncRequest{Need: 40}, "40, 50/80, 2", ""},
		{2 * hour, "a", SyncRequest{Sum: 50, Held: 10, Need: 30}, "30, 30/80, 1 warm", "ahead by two hours: all look dead"},
		{2*hour + 1*ms, "b", SyncRequest{Sum: 50, Held: 40, Need: 50}, "50, 80/80, 2 warm", "but nobody gets what is theirs"},
	})
}

// As the instances get more, they speak less often.
func TestFleetSync_BeatAndHold(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	for i := range 400 {
		r := s.do(SyncRequest{Instance: id(fmt.Sprint(i)), Sequence: 1, Capacity: 100})
		n := time.Duration(i + 1)
		if want := max(250*ms, n*ms); r.Beat != want {
			t.Fatalf("%d instances: beat %v, want %v", n, r.Beat, want)
		}
		if want := max(10*ms, n*ms*3/4); r.Hold != want {
			t.Fatalf("%d instances: hold %v, want %v", n, r.Hold, want)
		}
	}
	if ends := s.rdb.ZScore(t.Context(), fleetKeys[1], id("399")).Val(); ends != float64(s.start.Add(3200*ms).UnixMicro()) {
		t.Errorf("the last one is dropped at %v, want eight of its beats from now", ends)
	}
}

func TestFleetSync_KeysEnd(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	s.do(SyncRequest{Instance: id("a"), Sequence: 1, Capacity: 100})
	for _, key := range fleetKeys {
		if got := s.rdb.PTTL(t.Context(), key).Val(); got != 62*time.Second {
			t.Errorf("%s ends in %v, want 62s", key, got)
		}
	}
}

func TestFleetSettings_Allocation(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	cases := []struct {
		capacity int64
		reserve  float64
		want     int64
	}{
		{100, 20, 80}, {100, 0, 100}, {100, 100, 0}, {1, 20, 0}, {100, 29, 71}, {1000, 0.1, 999},
		{10, 25, 7}, {3, 33.34, 1}, {1_000_000_000, 0.01, 999_900_000}, {999_999_999, 33.33, 666_699_999},
	}
	for i, c := range cases {
		settings := FleetSettings{Capacity: c.capacity, Reserve: c.reserve}
		r := s.do(SyncRequest{Instance: id("a"), Sequence: int64(i + 1), Capacity: c.capacity, Reserve: settings.hundredths()})
		if got := settings.Allocation(); got != c.want || r.Allocation != c.want {
			t.Errorf("%d, reserve %v: %d here and %d in the script, want %d", c.capacity, c.reserve, got, r.Allocation, c.want)
		}
	}
}
