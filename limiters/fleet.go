// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

var fleetScript = newScript(lua.FleetSync)

// argFleetDeadline is where the deadline stands in the arguments of fleet_sync.lua.
const argFleetDeadline = 2

// SyncFleet runs fleet_sync.lua for a pool with the arguments that the script's
// header explains, within Timeout, and returns its integers. It sends the script
// once, unless the reply proves that it has not run. To an instance that does not
// know the server's time yet, and so gives no deadline, it gives its own.
func (r *Redis) SyncFleet(ctx context.Context, pool string, args []any) (reply []int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	start := time.Now()
	deadline, _ := ctx.Deadline()
	defer func() { r.observe("fleet_sync", time.Since(start), err) }()

	key := r.prefix + "{" + pool + "}:fleet"
	args = slices.Clone(args)
	unknown := args[argFleetDeadline] == int64(0)
	head := []any{"evalsha", fleetScript.hash, 1, key}
	for again := true; again; {
		to, err := r.node(ctx, key)
		if err != nil {
			return nil, fmt.Errorf("sync fleet: %w", err)
		}
		end := to.clock.at(deadline)
		if unknown {
			args[argFleetDeadline] = end
		}
		c := newCommand(ctx, argFirstKey, slices.Concat(head, args))
		sent, received := r.share(ctx, to, []*command{c})
		if reply, err = c.Cmder.(*scriptCmd).Result(); redis.HasErrorPrefix(err, "NOSCRIPT") {
			head[argCommand], head[argScript] = "eval", fleetScript.source
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("sync fleet: %w", err)
		}
		if len(reply) > 0 && !c.redirected {
			to.clock.learn(sent, received, reply[0])
		}
		again = unknown && len(reply) == 1 && reply[0] >= end && to.clock.at(deadline) > reply[0] && ctx.Err() == nil
	}
	return reply, nil
}
