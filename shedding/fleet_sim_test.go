// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// simulation is a fleet on virtual time around a real Redis, whose clock follows
// (an hour ahead). Only the network and the load are made up, and both follow
// from the seed.
type simulation struct {
	*testing.T
	seed  uint64
	rng   *rand.Rand
	redis *redistest.FakeServer
	rdb   *redis.Client
	sync  SyncFunc

	now, set time.Time // set: what Redis takes for the time
	settings FleetSettings
	faults   bool // calls get lost or late
	gone     bool // all do
	counted  bool // requests in progress are within the allocation
	lossy    bool // Redis loses data, so check may fail for a moment
	nodes    []*node
	calls    []*call // on their way to Redis
	born     int
	shed     int // requests
	syncs    int // that reached Redis
}

// node is one instance.
type node struct {
	share    share
	frozen   time.Time // until then, nothing happens
	beat     time.Time
	call     *call // under way
	waiting  int64 // requests, for a slot
	requests []time.Time
	load     float64       // requests a second
	length   time.Duration // of a request, on average
}

// call is a sync on the network.
type call struct {
	request        SyncRequest
	sent, run, due time.Time // due: when reply arrives; zero: never
	reply          *SyncReply
}

const (
	simTick    = 5 * ms
	simTimeout = 50 * ms
)

func newSimulation(t *testing.T, seed uint64, nodes int, settings FleetSettings) *simulation {
	s := redistest.StartFakeTime(t)
	sim := &simulation{
		T: t, seed: seed, rng: rand.New(rand.NewPCG(seed, seed)),
		redis: s, rdb: s.Client(), now: epoch, settings: settings,
	}
	sim.sync = redisSync(sim.rdb)
	for range nodes {
		sim.nodes = append(sim.nodes, sim.newNode())
	}
	return sim
}

func (s *simulation) newNode() *node {
	s.born++
	n := &node{length: 100 * ms, beat: s.now.Add(s.upTo(minBeat))}
	n.share.instance = fmt.Sprintf("%032x", s.born)
	n.share.set(s.settings)
	return n
}

func (s *simulation) upTo(d time.Duration) time.Duration {
	return time.Duration(s.rng.Float64() * float64(d))
}

// run lets time pass, and holds the invariants at every tick.
func (s *simulation) run(d time.Duration) {
	s.Helper()
	for end := s.now.Add(d); s.now.Before(end); s.now = s.now.Add(simTick) {
		for _, n := range s.nodes {
			if !s.now.Before(n.frozen) {
				s.step(n)
			}
		}
		slices.SortStableFunc(s.calls, func(a, b *call) int { return a.run.Compare(b.run) })
		for len(s.calls) > 0 && !s.calls[0].run.After(s.now) {
			s.execute(s.calls[0])
			s.calls = s.calls[1:]
		}
		if !s.lossy {
			s.check()
		}
	}
}

// step is one tick of an instance.
func (s *simulation) step(n *node) {
	n.requests = slices.DeleteFunc(n.requests, func(end time.Time) bool {
		if s.now.Before(end) {
			return false
		}
		n.share.release(Get)
		return true
	})
	s.serve(n)
	if c := n.call; c != nil {
		switch {
		case c.reply != nil && !c.due.IsZero() && !s.now.Before(c.due):
			n.share.reply(c.request, c.sent, s.now, *c.reply, s.rng.Float64())
			s.land(n)
		case s.now.Sub(c.sent) >= simTimeout:
			n.share.fail(errors.New("timeout"))
			s.land(n)
		}
	}
	for p := s.rng.Float64(); p > math.Exp(-n.load*simTick.Seconds()); p *= s.rng.Float64() {
		switch {
		case n.waiting == 0 && n.share.take(s.now, Get):
			s.begin(n)
		case s.now.Before(n.share.holdUntil):
			s.shed++
		case n.share.err == nil:
			n.waiting++
		case n.share.takeUnclaimed(s.now, Get):
			s.begin(n)
		default:
			s.shed++
		}
	}
	if n.call == nil && (n.waiting > 0 || !s.now.Before(n.beat)) {
		s.send(n)
	}
}

func (s *simulation) begin(n *node) {
	n.requests = append(n.requests, s.now.Add(time.Duration(s.rng.ExpFloat64()*float64(n.length))))
}

// serve is Fleet.serveLocked.
func (s *simulation) serve(n *node) {
	for n.waiting > 0 && n.share.take(s.now, Get) {
		n.waiting--
		s.begin(n)
	}
}

// land is Fleet.landLocked.
func (s *simulation) land(n *node) {
	n.call, n.beat = nil, s.now.Add(n.share.nextBeat(s.rng.Float64()))
	s.serve(n)
	if n.share.err == nil && !n.share.full {
		return // they ask again
	}
	for ; n.waiting > 0; n.waiting-- {
		if n.share.err != nil && n.share.takeUnclaimed(s.now, Get) {
			s.begin(n)
		} else {
			s.shed++
		}
	}
}

func (s *simulation) send(n *node) {
	c := &call{request: n.share.request(s.now, n.waiting), sent: s.now}
	n.call = c
	c.run = s.now.Add(s.upTo(4 * ms))
	c.due = c.run.Add(s.upTo(4 * ms))
	if s.gone {
		return
	}
	if s.faults {
		switch u := s.rng.Float64(); {
		case u < 0.10: // lost on the way there
			return
		case u < 0.20: // lost on the way back
			c.due = time.Time{}
		case u < 0.40: // slow: some come when nobody waits any more, or after later ones
			c.run = s.now.Add(s.upTo(400 * ms))
			c.due = c.run.Add(s.upTo(30 * ms))
		}
	}
	s.calls = append(s.calls, c)
}

// execute runs a call on Redis.
func (s *simulation) execute(c *call) {
	s.Helper()
	s.syncs++
	if !s.now.Equal(s.set) {
		s.set = s.now
		s.redis.SetTime(s.now.Add(time.Hour))
	}
	reply, err := s.sync(s.Context(), c.request)
	if err != nil {
		s.Fatalf("seed %d: %v", s.seed, err)
	}
	c.reply = &reply
	if reply.Claims > reply.Allocation {
		s.Fatalf("seed %d, %v: %d claims after %+v, want at most %d", s.seed, s.now.Sub(epoch), reply.Claims, c.request, reply.Allocation)
	}
}

// check holds what must hold at any time, Redis's data being intact: all that is
// claimed by instances that are alive, by their own account, fits.
func (s *simulation) check() {
	s.Helper()
	if claimed := s.claimed(); claimed > s.settings.Allocation() {
		s.Fatalf("seed %d, %v: the instances think they own %d slots, want at most %d", s.seed, s.now.Sub(epoch), claimed, s.settings.Allocation())
	}
	inFlight := int64(0)
	for _, n := range s.nodes {
		inFlight += n.share.inFlight
	}
	if s.counted && inFlight > s.settings.Allocation() {
		s.Fatalf("seed %d, %v: %d requests in progress, want at most %d", s.seed, s.now.Sub(epoch), inFlight, s.settings.Allocation())
	}
}

func (s *simulation) claimed() int64 {
	sum := int64(0)
	for _, n := range s.nodes {
		if s.now.Before(n.share.end) {
			sum += n.share.claim
		}
	}
	return sum
}

// stored reads the state in Redis: claims by instance, and totals.
func (s *simulation) stored() (claims, totals map[string]int64) {
	claims = map[string]int64{}
	for field, value := range s.rdb.HGetAll(s.Context(), fleetKey).Val() {
		if len(field) == 32 {
			value = strings.Fields(value)[1]
			claims[field], _ = strconv.ParseInt(value, 10, 64)
		}
	}
	return claims, readState(s.T, s.rdb)
}

// wrong reports what is wrong in Redis, or nothing: its totals are those of its
// entries, and its entries are those of the instances that are alive.
func (s *simulation) wrong() string {
	claims, totals := s.stored()
	sum := int64(0)
	for instance, claim := range claims {
		sum += claim
		if !slices.ContainsFunc(s.nodes, func(n *node) bool { return n.share.instance == instance }) {
			return fmt.Sprintf("a claim of %d is left of %s", claim, instance)
		}
	}
	for _, n := range s.nodes {
		if claim, ok := claims[n.share.instance]; !ok || s.now.Before(n.share.end) && claim < n.share.claim {
			return fmt.Sprintf("%s has a claim of %d, and %d in Redis", n.share.instance, n.share.claim, claim)
		}
	}
	if sum != totals["claims"] || int(totals["instances"]) != len(s.nodes) {
		return fmt.Sprintf("totals %v, want claims %d and %d instances", totals, sum, len(s.nodes))
	}
	return ""
}

// oneHot makes one instance alone busy beyond measure.
func (s *simulation) oneHot() *node {
	for _, n := range s.nodes {
		n.load, n.length = 0, 50*ms
	}
	hot := s.nodes[s.rng.IntN(len(s.nodes))]
	hot.load, hot.length = 20*float64(s.settings.Allocation()), 200*ms
	return hot
}

// Twenty instances join, die, freeze and lose messages, while load moves about. Whatever happens, nobody ever owns what another does.
func TestFleet_Stress(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			s := newSimulation(t, seed, 20, FleetSettings{Capacity: 100, Reserve: 20})
			s.faults = true
			var killed, frozen int
			for range 30 {
				i := s.rng.IntN(len(s.nodes))
				switch u := s.rng.Float64(); {
				case u < 0.2: // kill -9; another takes its place
					s.nodes[i] = s.newNode()
					killed++
				case u < 0.4:
					s.nodes[i].frozen = s.now.Add(s.upTo(5 * time.Second))
					frozen++
				}
				n := s.nodes[s.rng.IntN(len(s.nodes))]
				n.load = s.rng.Float64() * s.rng.Float64() * 1000
				n.length = 5*ms + s.upTo(400*ms)
				s.run(500 * ms)
			}

			s.faults = false
			s.run(5 * time.Second) // those that are frozen wake up
			hot := s.oneHot()
			s.run(10 * minBeat)
			if wrong := s.wrong(); wrong != "" {
				t.Errorf("ten beats after things calmed down: %s", wrong)
			}
			if got, want := hot.share.live(s.now), s.settings.Allocation()*95/100; got < want {
				t.Errorf("one hot instance has %d slots, want at least %d", got, want)
			}
			t.Logf("%d syncs, %d killed, %d frozen, %d requests shed", s.syncs, killed, frozen, s.shed)
		})
	}
}

// steady gives each instance a load that fits into its share, and lets it settle.
func (s *simulation) steady() {
	for _, n := range s.nodes {
		n.load, n.length = 20, 100*ms // 2 in progress of 8
	}
	s.run(3 * time.Second)
	s.shed = 0
}

// The key is lost while the fleet is at work. Within three beats all is right again,
// and nobody has been shed, for nobody lost what it had.
func TestFleet_KeyLost(t *testing.T) {
	s := newSimulation(t, 7, 10, FleetSettings{Capacity: 100, Reserve: 20})
	for i := range 5 {
		s.steady()
		s.run(s.upTo(minBeat))
		if n := s.rdb.Del(t.Context(), fleetKey).Val(); n != 1 {
			t.Fatalf("loss %d: %d keys deleted, want 1", i, n)
		}
		s.run(3 * minBeat)
		if wrong := s.wrong(); wrong != "" {
			t.Errorf("loss %d: three beats later: %s", i, wrong)
		}
		if s.shed > 0 {
			t.Errorf("loss %d: %d requests shed", i, s.shed)
		}
	}
}

// Redis goes back in time: a failover to a replica that lagged behind.
func TestFleet_Failover(t *testing.T) {
	s := newSimulation(t, 8, 10, FleetSettings{Capacity: 100, Reserve: 20})
	for _, lag := range []time.Duration{50 * ms, 200 * ms, time.Second, 5 * time.Second} {
		s.steady()
		dump := s.rdb.Dump(t.Context(), fleetKey).Val()
		s.run(lag)
		if err := s.rdb.RestoreReplace(t.Context(), fleetKey, time.Minute, dump).Err(); err != nil {
			t.Fatal(err)
		}
		// Who syncs first and lost nothing itself cannot tell that others did.
		s.lossy = true
		s.run(3 * minBeat)
		s.lossy = false
		if wrong := s.wrong(); wrong != "" {
			t.Errorf("three beats after going back by %v: %s", lag, wrong)
		}
		if s.shed > 0 {
			t.Errorf("going back by %v: %d requests shed", lag, s.shed)
		}
	}
}

// Redis is gone for a minute, and comes back with its data or without. Meanwhile
// everything passes; two beats later the count is right.
func TestFleet_RedisGone(t *testing.T) {
	for _, lost := range []bool{false, true} {
		s := newSimulation(t, 9, 10, FleetSettings{Capacity: 100, Reserve: 20})
		s.steady()
		s.gone = true
		s.run(time.Minute)
		if s.shed > 0 {
			t.Errorf("data lost: %v: %d requests shed while Redis was gone", lost, s.shed)
		}
		if lost {
			s.rdb.FlushAll(t.Context())
		}
		s.gone = false
		s.run(3 * minBeat) // beats are up to a fifth longer
		if wrong := s.wrong(); wrong != "" {
			t.Errorf("data lost: %v: two beats later: %s", lost, wrong)
		}
		if s.shed > 0 {
			t.Errorf("data lost: %v: %d requests shed after the return", lost, s.shed)
		}
	}
}

// Load moves from one instance to the next. Slots that one no longer needs are at
// another's disposal a few beats later, and never are more requests in progress
// than the allocation.
func TestFleet_LoadShifts(t *testing.T) {
	s := newSimulation(t, 10, 3, FleetSettings{Capacity: 100, Reserve: 20})
	s.counted = true
	for i := range 6 {
		for _, n := range s.nodes {
			n.load, n.length = 0, 50*ms
		}
		hot := s.nodes[i%3]
		hot.load = 2000 // 100 in progress, if they might
		s.run(4 * minBeat)
		if got := hot.share.live(s.now); got < 76 {
			t.Errorf("shift %d: four beats later the busy instance has %d slots of 80", i, got)
		}
	}
}

// One instance has everything when the others become as busy. It has to share.
func TestFleet_AllBusy(t *testing.T) {
	s := newSimulation(t, 11, 4, FleetSettings{Capacity: 100, Reserve: 20})
	s.counted = true
	for _, n := range s.nodes {
		n.length = 300 * ms
	}
	s.nodes[0].load = 2000
	s.run(4 * minBeat)
	for _, n := range s.nodes {
		n.load = 2000
	}
	s.run(12 * minBeat)
	for round := range 8 {
		s.run(minBeat)
		inFlight := int64(0)
		for i, n := range s.nodes {
			inFlight += n.share.inFlight
			if n.share.inFlight < 12 || n.share.inFlight > 28 {
				t.Errorf("round %d: instance %d has %d requests in progress, want about 20", round, i, n.share.inFlight)
			}
		}
		if inFlight < 72 {
			t.Errorf("round %d: %d requests in progress, want at most 80 and most of them", round, inFlight)
		}
	}
}
