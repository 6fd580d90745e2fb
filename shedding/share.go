// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// FleetSettings are the numbers of a fleet shedder.
type FleetSettings struct {
	// Capacity is how many requests the whole fleet can serve at once; 0 is
	// auto: the sum of the Workers of all instances.
	Capacity int64

	// Reserve is the percentage of the capacity that is kept for critical
	// requests, 0 to 100.
	Reserve float64

	// Workers is how many requests this instance can serve at once. It counts
	// with auto alone and may be 0 otherwise.
	Workers int64

	// ShareOnError keeps to this instance's equal share of the allocation while
	// the store fails. Without it everything passes then.
	ShareOnError bool

	// Timeout is how long one sync may take (default 50ms, at most 250ms).
	Timeout time.Duration
}

// maxSlots bounds numbers of requests so that the script's arithmetic is exact.
const maxSlots = 1_000_000_000

// Validate tells what is wrong with the numbers, if anything is.
func (s FleetSettings) Validate() error {
	switch {
	case s.Capacity < 0 || s.Capacity > maxSlots:
		return fmt.Errorf("capacity %d is not between 1 and %d", s.Capacity, maxSlots)
	case s.Workers < 0 || s.Workers > maxSlots:
		return fmt.Errorf("%d workers is not between 1 and %d", s.Workers, maxSlots)
	case s.Capacity == 0 && s.Workers == 0:
		return errors.New("capacity auto needs the number of workers")
	case !(s.Reserve >= 0 && s.Reserve <= 100):
		return fmt.Errorf("reserve %v is not between 0 and 100 percent", s.Reserve)
	}
	return nil
}

// hundredths is the reserve in hundredths of a percent: integers, because
// floor(100·(1 − 0.29)) is 70 in floats.
func (s FleetSettings) hundredths() int64 { return int64(math.Round(s.Reserve * 100)) }

// Allocation returns how many of the fleet's requests in progress may be
// non-critical, floor(capacity·(1 − reserve)); for auto, with this instance alone.
func (s FleetSettings) Allocation() int64 {
	return s.capacity() * (10_000 - s.hundredths()) / 10_000
}

func (s FleetSettings) capacity() int64 {
	if s.Capacity == 0 {
		return s.Workers
	}
	return s.Capacity
}

func (s FleetSettings) timeout() time.Duration {
	if s.Timeout <= 0 {
		return 50 * time.Millisecond
	}
	return min(s.Timeout, minBeat)
}

const (
	minBeat   = 250 * time.Millisecond
	peakBeats = 4 // beats whose peak headroom follows

	// Redis drops an instance that it has not heard of for eight beats. Its
	// claim ends here one beat before, whatever happens to this process.
	claimBeats = 7
)

// errIgnored is a sync that came too late to be looked at.
var errIgnored = errors.New("fleet sync: came too late and was ignored")

// share is what one instance knows of a fleet and owns in it. It is a state
// machine: time and chance are arguments, and request and reply go where the
// caller takes them, one pair at a time. It is not safe for concurrent use.
//
// The invariant: its claim is never more than what the fleet's state says it is,
// as long as that state keeps its data. So it is lowered in request, before the
// fleet hears of it, and raised by a reply alone.
type share struct {
	instance string
	settings FleetSettings
	lone     bool // there is no fleet but this process

	inFlight, critical int64 // in progress here

	claim     int64     // slots that are this instance's own
	limit     int64     // up to which inFlight may fill them
	end       time.Time // of both
	full      bool      // the last good reply did not give what was needed
	holdUntil time.Time // then do not ask before
	err       error     // of the last sync
	bare      bool      // the last good reply was the first

	sequence   int64
	generation int64     // of settings; 0 until the fleet has given it one
	fleet      SyncReply // the last good one
	serverTime int64     // µs of the fleet's clock ...
	serverAt   time.Time // ... at this time of ours
	peaks      [peakBeats]int64
	peakEnd    time.Time // of the beat that peaks[0] is about
}

// set puts settings in force, from the next request on where there is a fleet.
func (s *share) set(settings FleetSettings) {
	if settings.Capacity != s.settings.Capacity || settings.hundredths() != s.settings.hundredths() {
		s.generation = 0
	}
	s.settings = settings
}

// live is the limit that stands at now.
func (s *share) live(now time.Time) int64 {
	switch {
	case s.lone:
		return s.settings.Allocation()
	case now.Before(s.end):
		return s.limit
	}
	return 0
}

// take begins a request of class c and reports whether it may.
func (s *share) take(now time.Time, c Criticality) bool {
	if c != Critical && s.inFlight >= s.live(now) {
		return false
	}
	s.begin(c)
	return true
}

// takeUnclaimed is take beyond the claim, while the store fails. It need not say
// no, unless this instance is to keep to its equal share, or the fleet was full
// when last heard of: as long as the claim stands, a moment without the store must
// not open the gates of an overloaded fleet.
func (s *share) takeUnclaimed(now time.Time, c Criticality) bool {
	limit := int64(math.MaxInt64)
	if s.settings.ShareOnError {
		limit = s.settings.Allocation()
		if n := s.fleet.Instances; n > 0 {
			limit = min(s.fleet.Allocation, max(1, s.fleet.Allocation/n))
		}
	}
	if s.full && now.Before(s.end) {
		limit = 0
	}
	if c != Critical && s.inFlight >= max(limit, s.live(now)) {
		return false
	}
	s.begin(c)
	return true
}

func (s *share) begin(c Criticality) {
	if c == Critical {
		s.critical++
		return
	}
	s.inFlight++
	s.peaks[0] = max(s.peaks[0], s.inFlight)
}

// release ends a request that began. The script knows no negative numbers, so one
// that never began must not spoil the counts for good.
func (s *share) release(c Criticality) {
	if c == Critical {
		s.critical = max(0, s.critical-1)
	} else {
		s.inFlight = max(0, s.inFlight-1)
	}
}

// request is what to tell the fleet now, with so many requests waiting for a
// slot. It lowers the claim to what is still wanted.
func (s *share) request(now time.Time, waiting int64) SyncRequest {
	if !now.Before(s.peakEnd) {
		copy(s.peaks[1:], s.peaks[:peakBeats-1])
		s.peaks[0] = s.inFlight
		s.peakEnd = now.Add(max(minBeat, s.fleet.Beat))
	}
	peak := int64(0)
	for _, p := range s.peaks {
		peak = max(peak, p)
	}
	need := s.inFlight + waiting
	wanted, sum := need+s.headroom(peak), s.fleet.Claims
	if !now.Before(s.end) {
		// New here, or back after the claim had ended, as others may be: ask for
		// no more than what is in use, so that it is enough for all.
		s.claim, wanted, sum = 0, max(need, peak, 1), 0
	}
	// What is above the limit is given up once no request is in it any more.
	s.claim = min(s.claim, max(s.limit, s.inFlight), wanted)
	s.limit = min(s.limit, s.claim)
	s.sequence++
	r := SyncRequest{
		Instance: s.instance, Sequence: s.sequence, Epoch: s.fleet.Epoch,
		Held: s.claim, Need: need, Wanted: wanted, Sum: sum,
		InFlight: s.inFlight, Critical: s.critical, Workers: s.settings.Workers,
		Generation: s.generation, Capacity: s.settings.Capacity, Reserve: s.settings.hundredths(),
		Known: s.fleet.Capacity,
	}
	if s.serverTime > 0 {
		r.Deadline = s.serverTime + (now.Sub(s.serverAt) + s.settings.timeout()).Microseconds()
	}
	return r
}

// headroom is how many slots to have beyond what is needed, so that requests
// seldom wait for more: the peak of the last beats, or a tenth of an equal share of
// the allocation if that is more, while claims are up to 80 % of it, falling to
// none at 95 %. The tenth is for a load that comes from nothing: all of an idle
// fleet's headroom together is a tenth of the allocation, at most.
func (s *share) headroom(peak int64) int64 {
	peak = max(1, peak)
	if s.fleet.Epoch == 0 {
		return peak // nothing is known yet
	}
	allocation := s.fleet.Allocation
	most := max(peak, allocation/10/max(1, s.fleet.Instances))
	switch left := 95*allocation - 100*s.fleet.Claims; {
	case left <= 0:
		return 0
	case left < 15*allocation:
		return int64(float64(most) * float64(left) / float64(15*allocation))
	}
	return min(most, allocation)
}

// reply takes down the answer to the request that was sent at sent.
func (s *share) reply(request SyncRequest, sent, now time.Time, r SyncReply, u float64) {
	s.serverTime, s.serverAt = r.Now, now
	if r.Ignored {
		s.err = errIgnored
		return
	}
	s.err = nil
	s.bare = s.fleet.Epoch == 0 && r.Epoch != 0
	s.claim, s.limit, s.end = r.Claim, r.Limit, sent.Add(claimBeats*r.Beat)
	s.fleet = r
	if request.Generation == 0 && request.Capacity == s.settings.Capacity && request.Reserve == s.settings.hundredths() {
		s.generation = r.Generation
	}
	s.full, s.holdUntil = r.Limit < request.Need, time.Time{}
	if s.full {
		s.holdUntil = now.Add(jitter(r.Hold, u))
	}
}

// fail takes down that the last sync got no answer.
func (s *share) fail(err error) { s.err = err }

// nextBeat is how long to wait for the next sync: no time at all for one that has
// just come, which asks for its headroom as soon as it knows the fleet.
func (s *share) nextBeat(u float64) time.Duration {
	if s.bare && s.err == nil {
		return 0
	}
	return jitter(max(minBeat, s.fleet.Beat), u)
}

// jitter spreads instances apart: d ± 20 %, for u uniform in [0, 1).
func jitter(d time.Duration, u float64) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*u))
}
