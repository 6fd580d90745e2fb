// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/lua"
)

var fleetScript = newScript(lua.FleetSync)

// SyncFleet runs fleet_sync.lua for a pool with the arguments that the script's
// header explains, within Timeout, and returns its integers. It sends the script
// once, unless the reply proves that it has not run.
func (r *Redis) SyncFleet(ctx context.Context, pool string, args []any) (reply []int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	start := time.Now()
	defer func() { r.observe("fleet_sync", time.Since(start), err) }()

	key := r.prefix + "{" + pool + "}:fleet"
	node, err := r.node(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("sync fleet: %w", err)
	}
	for _, head := range [][]any{{"evalsha", fleetScript.hash}, {"eval", fleetScript.source}} {
		words := append(append(head, 2, key, key+":ends"), args...)
		cmd := scriptCmd{redis.NewIntSliceCmd(ctx, words...)}
		cmd.SetFirstKeyPos(argFirstKey)
		r.exec(ctx, node, []*command{{Cmder: cmd}})
		if reply, err = cmd.Result(); !redis.HasErrorPrefix(err, "NOSCRIPT") {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("sync fleet: %w", err)
	}
	return reply, nil
}
