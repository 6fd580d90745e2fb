// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"fmt"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func (h *Handler) unmarshalFleet(d *caddyfile.Dispenser) error {
	h.Fleet = new(FleetShedder)
	args, err := options{
		"reserve": readPercent(0, func(percent int) { h.Fleet.Reserve = &percent }),
		"mode":    readMode(&h.Fleet.Mode),
	}.read(d, true)
	switch {
	case err != nil:
		return err
	case len(args) == 0:
		err = fmt.Errorf("'fleet' needs a capacity, such as fleet 1000 reserve 20%%, or auto")
	case len(args) > 1:
		err = fmt.Errorf("unexpected '%s' after 'fleet %s'; its options are mode, reserve", args[1], args[0])
	case args[0] == "auto":
		h.Fleet.Auto = true
	default:
		if h.Fleet.Capacity, err = strconv.ParseInt(args[0], 10, 64); err != nil {
			err = fmt.Errorf("fleet '%s' is neither a whole number, such as 1000, nor auto", args[0])
		}
	}
	if err == nil {
		err = h.Fleet.validate()
	}
	return atStart(d, err)
}

func (h *Handler) unmarshalWorkers(d *caddyfile.Dispenser) error {
	h.Workers = new(WorkerShedder)
	args, err := options{
		"good":        readPercent(1, func(percent int) { h.Workers.Good = percent }),
		"bad":         readPercent(1, func(percent int) { h.Workers.Bad = percent }),
		"grace":       readGrace(&h.Workers.Grace),
		"ramp":        readDuration(&h.Workers.Ramp),
		"utilization": h.unmarshalUtilization,
		"mode":        readMode(&h.Workers.Mode),
	}.read(d, true)
	switch {
	case err != nil:
		return err
	case len(args) > 1:
		err = fmt.Errorf("unexpected '%s' after 'workers %s'; its options are bad, good, grace, mode, ramp, utilization", args[1], args[0])
	case len(args) == 1:
		if h.Workers.Count, err = strconv.ParseInt(args[0], 10, 64); err != nil || h.Workers.Count < 1 {
			err = fmt.Errorf("workers '%s' is not a whole number of at least 1, such as 64", args[0])
		}
	}
	if err == nil {
		err = h.Workers.validate()
	}
	return atStart(d, err)
}

// unmarshalUtilization reads the name of a guest module and what that takes.
func (h *Handler) unmarshalUtilization(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Err("'utilization' needs a source: in_flight, or probe <url> [<json pointer>]")
	}
	name := d.Val()
	id := utilizationNamespace + name
	if _, err := caddy.GetModule(id); err != nil {
		return d.Errf("utilization '%s' is no source; use in_flight, or probe <url> [<json pointer>]", name)
	}
	source, err := caddyfile.UnmarshalModule(d, id)
	if err != nil {
		return err
	}
	h.Workers.UtilizationRaw = caddyconfig.JSONModuleObject(source, "source", name, nil)
	return nil
}

// readPercent takes a percentage of at least low.
func readPercent(low int, set func(percent int)) option {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		if !d.NextArg() {
			return d.Errf("'%s' needs a percentage, such as 20%%", name)
		}
		percent, err := parsePercent(d.Val())
		if err != nil {
			return d.WrapErr(err)
		}
		if percent < low {
			return d.Errf("'%s' is a percentage of at least %d%%", name, low)
		}
		set(percent)
		return nil
	}
}

// readGrace takes a duration, which may be zero.
func readGrace(to **caddy.Duration) option {
	return func(d *caddyfile.Dispenser) error {
		if d.NextArg() {
			if v, err := caddy.ParseDuration(d.Val()); err == nil && v >= 0 {
				*to = new(caddy.Duration(v))
				return nil
			}
		}
		return d.Err("'grace' takes a duration, such as 28s, or 0s")
	}
}
