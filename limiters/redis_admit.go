// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// maxPiggyback bounds the releases that one admission applies on its way.
	maxPiggyback = 64

	// maxOvertaken bounds how often an admission asks again because leases end all
	// the time.
	maxOvertaken = 2

	// maxAttempts bounds how often a call is sent that replies prove not to have run.
	maxAttempts = 4
)

// errWrongType is returned for an identity one of whose keys holds what no limit
// has put there.
const errWrongType = answeredError("WRONGTYPE a key of the identity holds another kind of value")

// admitCall is a call of admit.lua about one identity.
type admitCall struct {
	ask   Ask
	id    uint64 // of the leases to take
	ends  uint32 // how many leases of its keys had ended when it was made
	more  bool   // too many leases have ended for one call
	whole bool   // the server does not know the script by its hash

	// What is sent: parts of one string.
	keys    []string
	members []string // the leases to take, one for each concurrency limit
	ended   []*lease // to be released on the way,
	counts  []int    // so many for each concurrency limit

	// Of who sends it.
	command  *admitCommand
	place    int          // in it
	deadline int64        // us of server time
	clock    *serverClock // of a node of the Cluster that it was redirected to

	sent   time.Time // the last time; zero if it was never
	answer []int64   // two integers for each check
	err    error     // errLate if the deadline had always passed

	// It was denied for want of a slot which this very process has freed, but
	// without saying so to Redis: there was too much to say, or the lease ended, and
	// its client came back, on a faster way. Nothing was taken, so it may ask again.
	unfair    bool
	overtaken int // how often that was for the latter reason

	fewKeys    [2]string
	fewMembers [1]string
	fewCounts  [1]int
}

// prepare makes a call that is to be sent at now.
func (r *Redis) prepare(c *admitCall, now time.Time, ask Ask) {
	*c = admitCall{ask: ask, overtaken: c.overtaken, whole: c.whole, clock: c.clock}
	c.keys, c.members, c.counts = c.fewKeys[:0], c.fewMembers[:0], c.fewCounts[:0]
	var digits [2 * len(ask.Identity)]byte
	hex.Encode(digits[:], ask.Identity[:])

	var room [512]byte
	var marks [8]int
	text, ends := room[:0], marks[:0]
	for _, check := range ask.Checks {
		text = check.Limit.keys.append(text, r.prefix, digits[:])
		ends = append(ends, len(text))
	}
	for _, check := range ask.Checks {
		if check.Limit.Kind != Concurrency {
			continue
		}
		if c.id == 0 {
			c.id = leaseID(now, time.Duration(r.ahead.Load()), r.nextID.Add(1))
		}
		text = r.appendMember(text, c.id, check.Limit.Lease)
		ends = append(ends, len(text))
	}

	whole, begin := string(text), 0
	for i, end := range ends {
		if part := whole[begin:end]; i < len(ask.Checks) {
			c.keys = append(c.keys, part)
		} else {
			c.members = append(c.members, part)
		}
		begin = end
	}
	for _, check := range ask.Checks {
		if l := check.Limit; l.Kind == Concurrency {
			c.ends += r.leases.endsOf(l.stateKey(ask.Identity)).Load()
			ended, more := r.leases.claim(now, c.id, l.stateKey(ask.Identity), maxPiggyback)
			for _, l := range ended {
				r.render(l)
			}
			c.ended, c.counts = append(c.ended, ended...), append(c.counts, len(ended))
			c.more = c.more || more
		}
	}
}

// mayHaveRun reports whether a call that failed may have taken effect, or may
// yet before its deadline.
func (c *admitCall) mayHaveRun() bool { return !c.sent.IsZero() && mayHaveRun(c.err) }

// admitCommand is a command that calls admit.lua about several identities, whose
// checks are the same.
type admitCommand struct {
	scriptCmd
	calls   []*admitCall
	numbers [2]int          // of keys and of identities
	told    map[*lease]bool // see first
}

// alike reports whether two calls may be in one command.
func (c *admitCall) alike(o *admitCall) bool {
	return c.whole == o.whole && slices.Equal(c.ask.Checks, o.ask.Checks)
}

// add adds a call, all of which are alike.
func (a *admitCommand) add(c *admitCall) {
	c.command, c.place = a, len(a.calls)
	a.calls = append(a.calls, c)
}

// first reports whether nobody has told of a lease before that it has ended. Of one
// identity there may be many calls, each of which knows nearly all of them, but the
// script needs to be told once.
func (a *admitCommand) first(l *lease) bool {
	if a.told[l] {
		return false
	}
	if a.told == nil {
		a.told = map[*lease]bool{}
	}
	a.told[l] = true
	return true
}

// compose makes the command, whose arguments are put into the room. Pointers and
// small integers among them are no allocations.
func (a *admitCommand) compose(ctx context.Context, room []any) []any {
	first := a.calls[0]
	checks := first.ask.Checks
	clear(a.told)
	a.numbers = [2]int{len(a.calls) * len(checks), len(a.calls)}
	args := append(room[:0], "evalsha", admitScript.hash, &a.numbers[0])
	if first.whole {
		args[argCommand], args[argScript] = "eval", admitScript.source
	}
	buckets := 0
	for _, c := range a.calls {
		for i := range c.keys {
			args = append(args, &c.keys[i])
		}
	}
	args = append(args, &a.numbers[1], nil)
	for _, check := range checks {
		if check.Limit.Kind == Rate {
			buckets++
		}
		args = append(append(args, check.Limit.args...), bit(check.Dark))
	}
	args[argFirstKey+a.numbers[0]+1] = buckets
	for _, c := range a.calls {
		args = append(args, &c.deadline)
		ended := c.ended
		for i, n := range c.counts {
			args = append(args, &c.members[i], nil)
			count := len(args) - 1
			for _, l := range ended[:n] {
				if n == 1 && len(a.told) == 0 || a.first(l) { // most know of one, and no other does
					args = append(args, &l.name)
				}
			}
			args[count] = len(args) - count - 1
			ended = ended[n:]
		}
	}
	a.scriptCmd = scriptCmd{IntSliceCmd: redis.NewIntSliceCmd(ctx, args...)}
	a.SetFirstKeyPos(argFirstKey)
	return args
}

// read takes a call's part out of what its command, sent at sent, was answered.
func (c *admitCall) read(sent time.Time, reply []int64, err error) {
	n := 2 * len(c.ask.Checks)
	c.sent, c.answer, c.err = sent, nil, err
	switch {
	case err != nil:
		c.whole = c.whole || redis.HasErrorPrefix(err, "NOSCRIPT")
	case len(reply) != 1+n*len(c.command.calls):
		c.err = errShape
	default:
		c.answer = reply[1+n*c.place:][:n]
		switch c.answer[0] {
		case replyLate:
			c.err = errLate
		case replyWrongType:
			c.err = errWrongType
		}
	}
}

// again reports whether the reply proves that a call has not run, but that it may
// the next time: the script was unknown, the deadline had passed because our
// estimate of the server's clock was off, or the server turns out to be one of a
// Cluster, and wants each identity in a command of its own. The estimate for a node
// which has never answered is so far in the past that its first call always comes
// late.
func (c *admitCall) again() bool {
	switch {
	case c.err == nil, c.err == errLate:
		return c.err != nil
	case redis.HasErrorPrefix(c.err, "CROSSSLOT"):
		return len(c.command.calls) > 1
	}
	return redis.HasErrorPrefix(c.err, "NOSCRIPT")
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// acknowledge notes what a call that is over has released.
func (r *Redis) acknowledge(c *admitCall) {
	c.unfair = false
	if c.err != nil {
		r.leases.disclaim(c.id, c.ended)
		return
	}
	r.leases.acknowledged(c.sent, c.ended)
	denied, refused, took, ends := false, false, false, uint32(0)
	for i, check := range c.ask.Checks {
		outcome := c.answer[2*i]
		took = took || outcome == replyAllowed
		refused = refused || outcome == replyDenied && !check.Dark
		if l := check.Limit; l.Kind == Concurrency {
			denied = denied || outcome == replyDenied
			ends += r.leases.endsOf(l.stateKey(c.ask.Identity)).Load()
		}
	}
	denied = denied && (refused || !took) // beside a dark denial something may be taken
	if c.unfair = denied && c.more; denied && !c.more && ends != c.ends && c.overtaken < maxOvertaken {
		c.unfair = true
		c.overtaken++
	}
	c.ended, c.more = nil, false
}

// conclude reads the answer of a call, which was made at start, into adm.
func (r *Redis) conclude(start time.Time, c *admitCall, adm *Admission) error {
	results := adm.Results[len(adm.Results):][:len(c.ask.Checks)]
	adm.Results = adm.Results[:len(adm.Results)+len(results)]
	allowed := true
	for i, check := range c.ask.Checks {
		if c.err == nil {
			results[i], c.err = check.Limit.result(c.answer[2*i], c.answer[2*i+1])
			if !check.Dark && results[i].Outcome == NotEvaluated {
				c.err = errShape // which only dark checks are
			}
			allowed = allowed && (check.Dark || results[i].Outcome == Allowed)
		}
	}
	if c.err == nil {
		adm.Allowed = adm.Allowed && allowed
		if !allowed {
			return nil
		}
	}

	held, slot := len(adm.leases), 0
	for i, check := range c.ask.Checks {
		l := check.Limit
		if l.Kind != Concurrency {
			continue
		}
		if c.err != nil || results[i].Outcome == Allowed {
			taken := adm.take(l.stateKey(c.ask.Identity), c.id, l.Lease)
			taken.name, taken.redisKey = c.members[slot], c.keys[i]
		}
		slot++
	}
	taken := adm.leases[held:]
	if c.err == nil {
		r.leases.hold(start, taken...)
		return nil
	}
	clear(results)
	if c.mayHaveRun() {
		r.leases.end(time.Now(), true, taken...)
	}
	adm.leases = adm.leases[:held]
	adm.room = nil // its lease may be in use
	return fmt.Errorf("admit: %w", c.err)
}
