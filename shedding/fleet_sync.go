// SPDX-License-Identifier: Apache-2.0

package shedding

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// SyncFunc brings a request to where the fleet's state is, lua/fleet_sync.lua on
// Redis, and the reply back. It must end with its context, and must never send a
// request again once Redis may have seen it (a client's retries must be off).
//
// Whoever runs the script runs it with [SyncRequest.Args] and hands its integers
// to [ParseSyncReply].
type SyncFunc func(context.Context, SyncRequest) (SyncReply, error)

// SyncRequest is what one instance states and asks for: the arguments of the
// script, whose header explains them.
type SyncRequest struct {
	Instance   string
	Sequence   int64
	Deadline   int64 // µs of server time; 0: none
	Leave      bool
	Epoch      int64
	Held       int64
	Need       int64
	Wanted     int64
	Sum        int64
	InFlight   int64
	Critical   int64
	Workers    int64
	Generation int64
	Capacity   int64 // 0: auto
	Reserve    int64 // hundredths of a percent
	Known      int64
}

// Args returns the script's arguments.
func (r SyncRequest) Args() []any {
	leave := 0
	if r.Leave {
		leave = 1
	}
	return []any{
		r.Instance, r.Sequence, r.Deadline, leave, r.Epoch,
		r.Held, r.Need, r.Wanted, r.Sum, r.InFlight, r.Critical, r.Workers,
		r.Generation, r.Capacity, r.Reserve, r.Known,
	}
}

// SyncReply is the script's reply, whose header explains it.
type SyncReply struct {
	Now     int64 // µs of server time
	Ignored bool  // nothing was written: too late or an old sequence number

	Claim      int64
	Limit      int64
	Beat       time.Duration
	Hold       time.Duration
	Epoch      int64
	Generation int64
	Capacity   int64
	Allocation int64
	Claims     int64
	InFlight   int64
	Critical   int64
	Workers    int64
	Instances  int64
	Drift      int64
	Warm       bool
}

// replySize is how many integers a whole reply has.
const replySize = 16

// What a reply may say. A number beyond these is no answer: it would shut an
// instance, or keep it from asking again, for ever.
const (
	maxReplyCount = 1 << 46      // slots, requests and instances, with room to multiply by 100
	maxReplyTime  = 1 << 53      // µs of server time
	maxReplyWait  = 3600_000_000 // µs of a beat and a hold
)

// ParseSyncReply makes sense of the integers that the script returned. It fails
// on a reply of another size, and on one with numbers that no fleet has.
func ParseSyncReply(reply []int64) (SyncReply, error) {
	switch len(reply) {
	case 1:
		if err := between("time", 0, maxReplyTime, reply[0]); err != nil {
			return SyncReply{}, err
		}
		return SyncReply{Now: reply[0], Ignored: true}, nil
	case replySize:
		if err := errors.Join(
			between("time", 0, maxReplyTime, reply[0], reply[5], reply[6]),
			between("beat", minBeat.Microseconds(), maxReplyWait, reply[3]),
			between("hold", 0, maxReplyWait, reply[4]),
			between("number of slots", 0, maxReplyCount, reply[1], reply[2], reply[7], reply[8]),
			between("total", -maxReplyCount, maxReplyCount, reply[9:15]...), // wrong ones are rebuilt
		); err != nil {
			return SyncReply{}, err
		}
		return SyncReply{
			Now:   reply[0],
			Claim: reply[1], Limit: reply[2],
			Beat:  time.Duration(reply[3]) * time.Microsecond,
			Hold:  time.Duration(reply[4]) * time.Microsecond,
			Epoch: reply[5], Generation: reply[6],
			Capacity: reply[7], Allocation: reply[8],
			Claims: reply[9], InFlight: reply[10], Critical: reply[11], Workers: reply[12], Instances: reply[13],
			Drift: reply[14], Warm: reply[15] == 1,
		}, nil
	}
	return SyncReply{}, fmt.Errorf("fleet sync: reply of %d integers, want 1 or %d", len(reply), replySize)
}

// between fails unless all numbers are between least and most.
func between(what string, least, most int64, numbers ...int64) error {
	for _, n := range numbers {
		if n < least || n > most {
			return fmt.Errorf("fleet sync: reply with a %s of %d", what, n)
		}
	}
	return nil
}
