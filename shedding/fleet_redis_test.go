// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

const fleetKey = "test:{pool}:fleet"

// redisSync runs the script; it is all that it takes to bring a Fleet to Redis.
func redisSync(rdb redis.Scripter) SyncFunc {
	script := redis.NewScript(lua.FleetSync)
	return func(ctx context.Context, request SyncRequest) (SyncReply, error) {
		reply, err := script.Run(ctx, rdb, []string{fleetKey}, request.Args()...).Int64Slice()
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
	if got := count(`(?m)^-- KEYS\[\d+\]`); got != 1 {
		t.Errorf("%d keys in the header, want 1", got)
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
	// So are those of the state, in the order in which it is read and written.
	want := strings.Join(stateNames, " ")
	for _, pattern := range []string{`(?s)\nlocal ([\w, \n]+) = match\(stored\[2\]`, `(?s)local state = format\([^,]+,\s+([\w, \n]+)\)`} {
		list := regexp.MustCompile(pattern).FindStringSubmatch(body)
		if list == nil {
			t.Fatalf("no %s", pattern)
		}
		got := strings.Join(regexp.MustCompile(`\w+`).FindAllString(list[1], -1), " ")
		if got = strings.Replace(got, "began now sweep", "began at sweep", 1); got != want {
			t.Errorf("state\n%s, in the header\n%s", got, want)
		}
	}
	s := newScriptTest(t)
	s.do(SyncRequest{Instance: id("a"), Sequence: 7, Held: 1, Wanted: 1, InFlight: 2, Critical: 3, Workers: 4, Generation: 5, Capacity: 100, Reserve: 2000})
	now := s.start.UnixMicro()
	entry := fmt.Sprint("7 1 2 3 4 ", now+2_000_000)
	if got := s.rdb.HGet(t.Context(), fleetKey, id("a")).Val(); got != entry {
		t.Errorf("the instance is %q, want %q", got, entry)
	}
	state := map[string]int64{
		"began": now, "at": now, "sweep": now + 2_000_000, "warm": now + 500_000, "lost": 0, "poor": 0, "poor_at": 0, "missing": 0,
		"newest": 5, "fixed": 100, "kept": 2000, "auto": 4, "auto_at": 0, "auto_max": 0,
		"claims": 1, "all_in_flight": 2, "all_critical": 3, "all_workers": 4, "instances": 1,
	}
	if diff := cmp.Diff(state, readState(t, s.rdb)); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}
}

// stateNames are what the script's header calls the numbers of the state.
var stateNames = func() (names []string) {
	for _, m := range regexp.MustCompile(`(?m)^--   state\[\d+\] (\w+)`).FindAllStringSubmatch(lua.FleetSync, -1) {
		names = append(names, m[1])
	}
	return names
}()

// readState reads the numbers of the state.
func readState(t *testing.T, rdb *redis.Client) map[string]int64 {
	t.Helper()
	text := rdb.HGet(t.Context(), fleetKey, "state").Val()
	numbers := strings.Fields(text)
	if len(numbers) != len(stateNames) {
		t.Fatalf("the state is %q, want %d numbers", text, len(stateNames))
	}
	state := map[string]int64{}
	for i, name := range stateNames {
		n, err := strconv.ParseInt(numbers[i], 10, 64)
		if err != nil {
			t.Fatalf("the state's %s: %v", name, err)
		}
		state[name] = n
	}
	return state
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
	test := &scriptTest{t, s, rdb, redisSync(rdb), time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
	test.at(0)
	return test
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

// change changes numbers of the state behind the script's back.
func (t *scriptTest) change(do func(state map[string]int64)) {
	t.Helper()
	state := readState(t.T, t.rdb)
	do(state)
	numbers := make([]string, len(stateNames))
	for i, name := range stateNames {
		numbers[i] = strconv.FormatInt(state[name], 10)
	}
	t.rdb.HSet(t.Context(), fleetKey, "state", strings.Join(numbers, " "))
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

// Instances that die one by one are looked for four times a beat, not each time.
func TestFleetSync_DropsManyDead(t *testing.T) {
	s := newScriptTest(t)
	for i := range 100 {
		s.at(time.Duration(i) * ms)
		s.do(SyncRequest{Instance: id(fmt.Sprint("dead", i)), Sequence: 1, Need: 1, Wanted: 1, Capacity: 100})
	}
	rows := []struct {
		at   time.Duration
		want string // claim, claims and instances
	}{
		{1999 * ms, "0, 100, 101"},
		{2000 * ms, "1, 100, 100"}, // the first is gone
		{2062 * ms, "1, 100, 100"},
		{2063 * ms, "64, 100, 37"}, // those that ended within a quarter of a beat
		{2125 * ms, "64, 100, 37"},
		{2126 * ms, "100, 100, 1"},
	}
	held := int64(0)
	for i, row := range rows {
		s.at(row.at)
		r := s.do(SyncRequest{Instance: id("a"), Sequence: int64(i + 1), Held: held, Need: 100, Wanted: 100, Capacity: 100})
		held = r.Claim
		if got := fmt.Sprintf("%d, %d, %d", r.Claim, r.Claims, r.Instances); got != row.want {
			t.Errorf("at %v: got %q, want %q", row.at, got, row.want)
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

// Nobody ends before the next look: one that comes when the fleet has shrunk, and
// beats have become shorter, brings it forward.
func TestFleetSync_LooksInTime(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{{0, "a", SyncRequest{Need: 80}, "80, 80/80, 1", ""}})
	s.change(func(state map[string]int64) { state["sweep"] += 6_000_000 })
	s.play(100, 2000, []row{
		{1000 * ms, "b", SyncRequest{Need: 1}, "0, 80/80, 2", ""},
		{2999 * ms, "c", SyncRequest{Need: 1}, "0, 80/80, 3", "not looked through yet"},
		{3000 * ms, "c", SyncRequest{Held: 0, Need: 1}, "1, 1/80, 1", "b has ended, and a is seen to have"},
	})
}

// What nobody can read is as good as lost, and heals.
func TestFleetSync_StateUnreadable(t *testing.T) {
	s := newScriptTest(t)
	hset := func(field, value string) { s.rdb.HSet(t.Context(), fleetKey, field, value) }
	state := func() string { return s.rdb.HGet(t.Context(), fleetKey, "state").Val() }
	cases := []struct {
		name  string
		spoil func()
	}{
		{"empty", func() { hset("state", "") }},
		{"words", func() { hset("state", strings.Repeat("x ", 18)+"x") }},
		{"a number too few", func() { hset("state", state()[:strings.LastIndex(state(), " ")]) }},
		{"a number too many", func() { hset("state", state()+" 1") }},
		{"a fraction", func() { hset("state", state()+".5") }},
		{"no number", func() { hset("state", state()[:strings.LastIndex(state(), " ")]+" inf") }},
		{"gone", func() { s.rdb.HDel(t.Context(), fleetKey, "state") }},
		{"field by field", func() {
			s.rdb.Del(t.Context(), fleetKey)
			s.rdb.HSet(t.Context(), fleetKey, "epoch", 1, "at", 1, "claims", 20, "instances", 1, id("a"), "1 20 0 0 0")
		}},
	}
	for i, c := range cases {
		s.rdb.Del(t.Context(), fleetKey)
		start := time.Duration(i) * time.Minute
		s.play(100, 2000, []row{{start, "a", SyncRequest{Need: 20}, "20, 20/80, 1", c.name}})
		epoch := readState(t, s.rdb)["began"]
		c.spoil()
		s.play(100, 2000, []row{
			{start + 1*ms, "b", SyncRequest{Need: 1}, "1, 1/80, 1", c.name},
			{start + 2*ms, "a", SyncRequest{Epoch: epoch, Sum: 20, Held: 20, Need: 30}, "30, 31/80, 2 warm", c.name},
			{start + 502*ms, "a", SyncRequest{Epoch: epoch, Sum: 20, Held: 30, Need: 30}, "30, 31/80, 2", c.name},
		})
		if n := s.rdb.HLen(t.Context(), fleetKey).Val(); n != 3 {
			t.Errorf("%s: %d fields are left, want 3", c.name, n)
		}
	}

	// The same of an instance; the totals are right when they are rebuilt.
	s.rdb.Del(t.Context(), fleetKey)
	s.play(100, 2000, []row{{time.Hour, "a", SyncRequest{Need: 20}, "20, 20/80, 1", ""}})
	hset(id("a"), "1 20 0 0")
	s.play(100, 2000, []row{
		{time.Hour + 1*ms, "a", SyncRequest{Sequence: 5, Sum: 20, Held: 20, Need: 20}, "20, 40/80, 2 warm", ""},
		{time.Hour + 2001*ms, "b", SyncRequest{Need: 1}, "1, 1/80, 1 drift 21", ""},
	})
}

// Numbers stay exact up to 2^53.
func TestFleetSync_LargeNumbers(t *testing.T) {
	s := newScriptTest(t)
	const large = 1<<53 - 1
	a := SyncRequest{Instance: id("a"), Sequence: large - 1, Generation: large, Capacity: 1_000_000_000, Need: 999_999_999, Wanted: 999_999_999, Workers: 999_999_999}
	first := s.do(a)
	a.Sequence, a.Held = large, first.Claim
	for _, r := range []SyncReply{first, s.do(a)} {
		if r.Ignored || r.Generation != large || r.Claim != 999_999_999 || r.Workers != 999_999_999 {
			t.Errorf("got %+v, want the numbers that were sent", r)
		}
	}
	if again := s.do(a); !again.Ignored {
		t.Errorf("the same sequence number again: got %+v, want it to be ignored", again)
	}
}

// A replica that lagged behind: it has the epoch, and an older claim.
func TestFleetSync_StateOlder(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{{0, "a", SyncRequest{}, "0, 0/80, 1", ""}})
	epoch := readState(t, s.rdb)["began"]
	dump := s.rdb.Dump(t.Context(), fleetKey).Val()
	s.play(100, 2000, []row{{1000 * ms, "a", SyncRequest{Epoch: epoch, Sequence: 10, Held: 0, Need: 60}, "60, 60/80, 1", ""}})
	s.rdb.RestoreReplace(t.Context(), fleetKey, time.Minute, dump)
	s.play(100, 2000, []row{
		{1001 * ms, "a", SyncRequest{Epoch: epoch, Sequence: 11, Sum: 80, Held: 60, Need: 70}, "60, 60/80, 1 warm", "back to what it held"},
	})
}

func TestFleetSync_RebuildsTotals(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{
		{0, "a", SyncRequest{Need: 10}, "10, 10/80, 1", ""},
		{0, "b", SyncRequest{Need: 10}, "10, 20/80, 2", ""},
	})
	s.change(func(state map[string]int64) { state["claims"] += 60; state["all_workers"] -= 7 })
	s.play(100, 2000, []row{
		{1000 * ms, "a", SyncRequest{Sequence: 10, Held: 10, Need: 11}, "10, 80/80, 2", ""},
		{1000 * ms, "b", SyncRequest{Sequence: 10, Held: 10, Need: 11}, "10, 80/80, 2", ""},
		{1999 * ms, "a", SyncRequest{Sequence: 11, Held: 10, Need: 11}, "10, 80/80, 2", ""},
		{2000 * ms, "a", SyncRequest{Sequence: 12, Held: 10, Need: 11}, "11, 21/80, 2 drift 67", "when one might have ended"},
		{2001 * ms, "b", SyncRequest{Sequence: 12, Held: 10, Need: 11}, "11, 22/80, 2", ""},
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

// What is for a moment stays so, if the clock goes back by an hour in it.
func TestFleetSync_MomentsEnd(t *testing.T) {
	s := newScriptTest(t)
	s.play(100, 2000, []row{
		{time.Hour, "a", SyncRequest{Epoch: 1, Sum: 80, Held: 79, Need: 79}, "79, 79/80, 1 warm", ""},
		{time.Hour, "c", SyncRequest{Need: 1}, "0, 79/80, 2 warm", "the last slot may be somebody's"},
		{0, "a", SyncRequest{Held: 10, Need: 10}, "10>9, 10/80, 2 warm", ""},
		{499 * ms, "a", SyncRequest{Held: 9, Need: 9}, "9, 9/80, 2 warm", "nobody is poor any more"},
		{500 * ms, "a", SyncRequest{Held: 9, Need: 80}, "80, 80/80, 2", "nor is anything kept"},
	})
}

// As the instances get more, they speak less often.
func TestFleetSync_BeatAndHold(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	for i := range 400 {
		r := s.do(SyncRequest{Instance: id(fmt.Sprint(i)), Sequence: 1, Capacity: 100})
		n := time.Duration(i + 1)
		if want := max(250*ms, n*ms*3/2); r.Beat != want {
			t.Fatalf("%d instances: beat %v, want %v", n, r.Beat, want)
		}
		if want := max(10*ms, n*ms*3/2); r.Hold != want {
			t.Fatalf("%d instances: hold %v, want %v", n, r.Hold, want)
		}
	}
	want := fmt.Sprint("1 0 0 0 0 ", s.start.Add(4800*ms).UnixMicro())
	if got := s.rdb.HGet(t.Context(), fleetKey, id("399")).Val(); got != want {
		t.Errorf("the last one is %q, want %q: eight of its beats from now", got, want)
	}
}

func TestFleetSync_KeysEnd(t *testing.T) {
	s := newScriptTest(t)
	s.at(0)
	s.do(SyncRequest{Instance: id("a"), Sequence: 1, Capacity: 100})
	if got := s.rdb.PTTL(t.Context(), fleetKey).Val(); got != 62*time.Second {
		t.Errorf("the key ends in %v, want 62s", got)
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
