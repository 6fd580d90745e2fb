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
	In     float64            // bytes from clients
	Out    float64            // bytes to them
}

// ReadUsage asks a redis-server for its usage.
func ReadUsage(ctx context.Context, rdb *redis.Client) (Usage, error) {
	info, err := rdb.Info(ctx, "cpu", "commandstats", "stats").Result()
	if err != nil {
		return Usage{}, err
	}
	return parseInfo(info)
}

func parseInfo(info string) (u Usage, err error) {
	u.Calls = map[string]float64{}
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		var err error
		switch name {
		case "used_cpu_user", "used_cpu_sys":
			var seconds float64
			seconds, err = strconv.ParseFloat(value, 64)
			u.CPU += seconds * 1e6
		case "total_net_input_bytes":
			u.In, err = strconv.ParseFloat(value, 64)
		case "total_net_output_bytes":
			u.Out, err = strconv.ParseFloat(value, 64)
		}
		if err != nil {
			return u, err
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
