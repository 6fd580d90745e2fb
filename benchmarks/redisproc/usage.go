// SPDX-License-Identifier: Apache-2.0

package redisproc

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Usage is what a redis-server has done since it began.
type Usage struct {
	CPU    float64            // us, of all threads, as the operating system counts
	Calls  map[string]float64 // by command; those that scripts make, too
	Script float64            // us within scripts, as Redis measures
}

// ReadUsage asks a redis-server for its usage.
func ReadUsage(ctx context.Context, rdb *redis.Client) (Usage, error) {
	info, err := rdb.Info(ctx, "cpu", "commandstats").Result()
	if err != nil {
		return Usage{}, err
	}
	return parseInfo(info)
}

func parseInfo(info string) (u Usage, err error) {
	u.Calls = map[string]float64{}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_user" || name == "used_cpu_sys" {
			seconds, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return u, err
			}
			u.CPU += seconds * 1e6
		}
		if command, ok := strings.CutPrefix(name, "cmdstat_"); ok && command != "info" {
			var calls, us float64
			if _, err := fmt.Sscanf(value, "calls=%f,usec=%f,", &calls, &us); err != nil {
				return u, fmt.Errorf("%s: %w", line, err)
			}
			u.Calls[command] = calls
			if command == "evalsha" || command == "eval" {
				u.Script += us
			}
		}
	}
	return u, nil
}
