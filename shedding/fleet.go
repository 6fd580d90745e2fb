// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"container/list"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"log/slog"
	mathrand "math/rand/v2"
	"sync"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

// Fleet keeps a part of the fleet's capacity for critical requests: over all
// instances that share its state, no more non-critical requests are in progress
// than the allocation, floor(capacity·(1 − reserve)). Critical ones always pass.
//
// An instance owns a claim on a number of slots and admits requests against it
// with no network in between. The claim follows the load, by a sync each beat and
// when it does not suffice. So the bound is exact from above; from below, slots
// may lie idle in one place for about a beat while another sheds.
//
// While the store fails everything passes, or the instance keeps to its equal
// share; if the fleet was full, that begins when the claim ends, seven beats after
// the last good sync. Until the first Set everything passes and is counted. A Fleet is safe
// for concurrent use.
type Fleet struct {
	sync SyncFunc // nil: this process is all there is
	log  *slog.Logger
	wake chan struct{} // wants a sync before the next beat
	stop chan struct{}
	done chan struct{}

	mu      sync.Mutex // guards below
	share   share
	running bool
	closed  bool
	queue   list.List // of *waiter, the first to come in front
}

// waiter is a request that waits for a slot. Its fields are guarded by Fleet.mu.
type waiter struct {
	done  chan struct{} // closed when it is known how the request fares
	begun bool          // it got a slot; counted already
	err   error         // why it got no answer
}

// FleetStatus is what a fleet shedder knows at one moment.
type FleetStatus struct {
	InFlight int64 // non-critical requests in progress on this instance
	Critical int64 // critical ones
	Claim    int64 // slots that this instance has for non-critical ones
	Err      error // why the last sync failed, or nil

	// Fleet is what the last good sync told of all instances, zero before the
	// first. That of a lone process is its own.
	Fleet SyncReply
}

// errClosed is why a request passes a Fleet that is closed.
var errClosed = errors.New("fleet: closed")

// NewFleet returns a fleet shedder that counts and sheds nothing yet. With a nil
// sync the fleet is this one process. What goes wrong is logged to log.
func NewFleet(sync SyncFunc, log *slog.Logger) *Fleet {
	// An id is for one Fleet, not for the process: sequence numbers start anew.
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	return &Fleet{
		sync: sync, log: log,
		wake:  make(chan struct{}, 1),
		stop:  make(chan struct{}),
		done:  make(chan struct{}),
		share: share{instance: hex.EncodeToString(id), lone: sync == nil},
	}
}

// Set puts settings in force, fleet-wide if they are the newest. The first Set
// registers the instance and starts its beats.
func (f *Fleet) Set(settings FleetSettings) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.share.set(settings)
	if !f.running && f.sync != nil {
		go f.run()
	}
	f.running = true
	f.wakeLocked()
}

// Close withdraws the instance and its claim, and waits for that at most for the
// timeout of a sync or two. From then on everything passes and is counted.
func (f *Fleet) Close() {
	f.mu.Lock()
	beats := f.running && f.sync != nil
	if !f.closed {
		f.closed, f.running = true, false
		close(f.stop)
	}
	f.mu.Unlock()
	if beats {
		<-f.done
	}
}

// TryAcquire begins a request of class c if a slot of the claim is free, which is
// the usual case, and reports whether it did. It never waits. What is critical
// always begins. Release ends the request.
func (f *Fleet) TryAcquire(c Criticality) bool {
	var now time.Time
	if !f.share.lone { // which never changes; then no claim ends
		now = clock()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tryLocked(now, c)
}

func (f *Fleet) tryLocked(now time.Time, c Criticality) bool {
	switch {
	case !f.running:
		f.share.begin(c)
		return true
	case c != Critical && f.queue.Len() > 0: // they are first
		return false
	}
	return f.share.take(now, c)
}

// Acquire is TryAcquire that, where no slot is free, asks the fleet for more and
// waits for the answer, or for a slot that becomes free here. All requests that
// lack a slot share one sync. They are shed if the fleet answers that it has less
// than they need, as are for a moment those that come after them. So a request
// waits for the sync under way and its own, and never longer than ctx, which must
// have the deadline of all store work of a request.
//
//	true, nil    a slot was free: go on, and Release
//	true, err    the store failed: go on all the same, and Release
//	false, nil   shed
//	false, err   ctx was canceled, so nobody waits for an answer any more
func (f *Fleet) Acquire(ctx context.Context, c Criticality) (bool, error) {
	now := clock()
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.tryLocked(now, c):
		return true, nil
	case f.share.lone || now.Before(f.share.holdUntil):
		return false, nil
	case f.share.err != nil: // known to fail: the next beat tells whether it still does
		return f.unclaimedLocked(c, f.share.err)
	}
	w := &waiter{done: make(chan struct{})}
	place := f.queue.PushBack(w)
	if f.queue.Len() == 1 { // a sync under way sees to those who came since
		f.wakeLocked()
	}
	f.mu.Unlock()
	select {
	case <-w.done:
	case <-ctx.Done():
	}
	f.mu.Lock()
	return f.leaveLocked(ctx, place, c)
}

// Release ends a request of class c that began.
func (f *Fleet) Release(c Criticality) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.share.release(c)
	if f.queue.Len() > 0 {
		f.serveLocked(clock())
	}
}

// Status returns what the shedder knows.
func (f *Fleet) Status() FleetStatus {
	now := clock()
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &f.share
	status := FleetStatus{InFlight: s.inFlight, Critical: s.critical, Claim: s.live(now), Err: s.err, Fleet: s.fleet}
	if s.lone && f.running {
		status.Fleet = SyncReply{
			Claim: status.Claim, Limit: status.Claim, Claims: status.Claim, Allocation: status.Claim, Capacity: s.settings.capacity(),
			InFlight: s.inFlight, Critical: s.critical, Workers: s.settings.Workers, Instances: 1,
		}
	}
	return status
}

func (f *Fleet) wakeLocked() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// unwakeLocked takes back the wake of those who wait.
func (f *Fleet) unwakeLocked() {
	select {
	case <-f.wake:
	default:
	}
}

// leaveLocked is how a request fares that waited, until that was known or the
// context had ended, or both.
func (f *Fleet) leaveLocked(ctx context.Context, place *list.Element, c Criticality) (bool, error) {
	w := place.Value.(*waiter)
	select {
	case <-w.done:
		if w.begun || w.err == nil {
			return w.begun, nil
		}
		return f.unclaimedLocked(c, w.err)
	default:
	}
	f.queue.Remove(place)
	err := ctx.Err()
	if !errors.Is(err, context.DeadlineExceeded) {
		return false, err
	}
	return f.unclaimedLocked(c, err)
}

// unclaimedLocked is how a request fares for which the store failed.
func (f *Fleet) unclaimedLocked(c Criticality, err error) (bool, error) {
	if !f.share.takeUnclaimed(clock(), c) {
		return false, nil
	}
	return true, err
}

// serveLocked lets as many requests that wait begin as there are free slots.
func (f *Fleet) serveLocked(now time.Time) {
	for f.queue.Len() > 0 && f.share.take(now, Get) {
		f.dismissLocked(true, nil)
	}
}

// dismissLocked ends the wait of the request in front.
func (f *Fleet) dismissLocked(begun bool, err error) {
	w := f.queue.Remove(f.queue.Front()).(*waiter)
	w.begun, w.err = begun, err
	close(w.done)
}

// dismissAllLocked ends the wait of all, without a slot.
func (f *Fleet) dismissAllLocked(err error) {
	f.unwakeLocked()
	for f.queue.Len() > 0 {
		f.dismissLocked(false, err)
	}
}

// landLocked is what the answer to a sync means for the requests that wait.
func (f *Fleet) landLocked(now time.Time) {
	f.serveLocked(now)
	switch {
	case f.queue.Len() == 0:
	case f.share.err != nil || f.share.full:
		// Who came meanwhile need not ask what has just been answered.
		f.dismissAllLocked(f.share.err)
	default:
		// The fleet had what was asked for, but more have come since, or have begun
		// without a claim. That there is no room for them nobody has said.
		f.wakeLocked()
	}
}

// run syncs each beat, and in between when it is woken.
func (f *Fleet) run() {
	defer close(f.done)
	beat := time.NewTimer(0)
	defer beat.Stop()
	for {
		select {
		case <-f.stop:
			_ = safely.Do("beat", f.withdraw)
			return
		case <-beat.C:
		case <-f.wake:
		}
		beat.Reset(f.once())
	}
}

// once does one sync and returns how long to wait for the next beat. After a bug
// in it, as after any failure, nobody asks before the next beat.
func (f *Fleet) once() time.Duration {
	bug := safely.Do("beat", f.exchange)

	f.mu.Lock()
	defer f.mu.Unlock()
	if bug != nil {
		f.share.fail(bug)
	}
	f.landLocked(clock())
	return f.share.nextBeat(mathrand.Float64())
}

// exchange brings the fleet what this instance has to say, and takes down the
// answer.
func (f *Fleet) exchange() {
	sent := clock()
	request, timeout := f.request(sent)
	reply, err := f.call(timeout, request)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.share.fail(err)
		return
	}
	f.share.reply(request, sent, clock(), reply, mathrand.Float64())
	if reply.Drift > 0 {
		f.log.Warn("the fleet's totals were wrong and have been rebuilt", "difference", reply.Drift)
	}
}

// request returns what to tell the fleet, for all that wait, too, and how long
// that may take.
func (f *Fleet) request(now time.Time) (SyncRequest, time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unwakeLocked()
	return f.share.request(now, int64(f.queue.Len())), f.share.settings.timeout()
}

// withdraw tells the fleet that this instance is no more.
func (f *Fleet) withdraw() {
	request, timeout := f.farewell()
	if _, err := f.call(timeout, request); err != nil {
		f.log.Info("could not withdraw from the fleet; the claim ends by itself", "error", err)
	}
}

func (f *Fleet) farewell() (SyncRequest, time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dismissAllLocked(errClosed)
	request := f.share.request(clock(), 0)
	request.Leave = true
	f.share.limit = 0
	return request, f.share.settings.timeout()
}

// call brings a request to the fleet and survives what goes wrong there.
func (f *Fleet) call(timeout time.Duration, request SyncRequest) (reply SyncReply, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if bug := safely.Do("fleet_sync", func() { reply, err = f.sync(ctx, request) }); bug != nil {
		return SyncReply{}, bug
	}
	return reply, err
}
