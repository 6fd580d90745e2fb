// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/user"
	"strings"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
)

// exitPending is the exit code of a change that is in force on one instance
// alone so far, because the store does not answer.
const exitPending = 4

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "stripe-ratelimit",
		Short: "Watches and controls the limits of a running Caddy",
		Long: `
Shows what the limits of a running Caddy do, weakens them in an incident, and
looks after single clients, all over the admin API of one instance. What is
changed fleet-wide is in force on every instance that shares its Redis within
half a second; of more than 62 instances, within 8 ms for each.

Exit codes: 0 done, 1 failed and nothing was changed, 4 in force on this
instance alone so far because Redis does not answer.`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.Example = `  caddy stripe-ratelimit status
  caddy stripe-ratelimit switch --all off --for 30m --reason "INC-123"
  caddy stripe-ratelimit switch --all clear
  caddy stripe-ratelimit inspect --key-file key.txt`
			cmd.Args = cobra.ArbitraryArgs
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				if len(args) == 0 {
					return cmd.Help()
				}
				cmd.SilenceUsage = true
				return fmt.Errorf("there is no command '%s'; there are status, switch, inspect, reset and override", args[0])
			}
			cmd.PersistentFlags().String("address", "", "Address of the admin API, such as localhost:2019 or unix//run/caddy.sock (default: that of --config, else localhost:2019)")
			cmd.PersistentFlags().StringP("config", "c", "", "Config file that names the address of the admin API")
			cmd.PersistentFlags().StringP("adapter", "a", "", "Name of the config's adapter")
			cmd.PersistentFlags().Bool("json", false, "Print what the admin API answers")
			cmd.AddCommand(statusCommand(), switchCommand(), inspectCommand(), resetCommand(), overrideCommand())
		},
	})
}

// target are the flags that name limits.
func targetFlags(cmd *cobra.Command) {
	cmd.Flags().String("pool", "", "Pool")
	cmd.Flags().String("kind", "", "Kind: rate, concurrency, fleet or workers")
	cmd.Flags().String("limit", "", "Name of a rate or concurrency limit")
}

func (c *client) target() targetRequest {
	return targetRequest{Pool: c.flag("pool"), Kind: c.flag("kind"), Limit: c.flag("limit")}
}

func (c *client) flag(name string) string { return c.cmd.Flag(name).Value.String() }

// noteFlags are the flags that say who changes something, why and for how long.
func noteFlags(cmd *cobra.Command) {
	cmd.Flags().String("for", "", "When it ends by itself, such as 30m or 2d (required)")
	reasonFlags(cmd)
}

func reasonFlags(cmd *cobra.Command) {
	cmd.Flags().String("reason", "", "Why, for those who find it (required)")
	cmd.Flags().String("actor", "", "Who (default: you, as the system knows you)")
}

func (c *client) note() (n noteRequest, err error) {
	if n.TTL = c.flag("for"); n.TTL == "" {
		return n, errors.New("--for is missing: when does it end by itself? Such as --for 30m")
	}
	n.Reason, n.Actor, err = c.reason()
	return n, err
}

// reason returns why something is changed, and who does it.
func (c *client) reason() (reason, actor string, err error) {
	if reason = c.flag("reason"); reason == "" {
		err = errors.New(`--reason is missing: say why, for those who find it. Such as --reason "INC-123"`)
	}
	return reason, cmp.Or(c.flag("actor"), whoAmI()), err
}

// whoAmI is the user at this machine.
func whoAmI() string {
	name := "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return name[:min(len(name), 100)]
}

// identityFlags are the flags that name whom a request is counted under.
func identityFlags(cmd *cobra.Command) {
	cmd.Flags().String("identity", "", "Identity, the hash that logs show")
	cmd.Flags().String("key-file", "", "File with the API key, or - for standard input; so that it is in no shell history")
	cmd.Flags().String("source", sourceAPIKey, "What the key is: api_key, client_ip or a source as the config has it")
	cmd.MarkFlagsMutuallyExclusive("identity", "key-file")
	cmd.MarkFlagsOneRequired("identity", "key-file")
}

// maxKeyFile bounds what is read of a file that holds a key.
const maxKeyFile = 64 << 10

func (c *client) identity() (identityRequest, error) {
	file := c.flag("key-file")
	if file == "" {
		return identityRequest{Identity: c.flag("identity")}, nil
	}
	in := c.cmd.InOrStdin()
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return identityRequest{}, err
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxKeyFile+1))
	switch key := strings.TrimSpace(string(text)); {
	case err != nil:
		return identityRequest{}, err
	case len(text) > maxKeyFile:
		return identityRequest{}, fmt.Errorf("more than %d bytes: this is no key", maxKeyFile)
	case key == "":
		return identityRequest{}, errors.New("the key is empty")
	default:
		return identityRequest{Source: c.flag("source"), Value: key}, nil
	}
}

func switchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "switch [--all | --pool <pool> [--kind <kind> [--limit <limit>]]] [off|dark|enforce <percent>|clear]",
		Short: "Weakens limits, for a while; without arguments lists what is switched",
		Long: `
Weakens how limits are applied: off asks nobody, dark decides and counts but
rejects nothing, enforce <percent> rejects for a part of the clients. A switch
never makes a limit stronger than its config. It ends by itself.

clear ends the switch of exactly this target; with --all it ends every switch.`,
		Example: `  caddy stripe-ratelimit switch --all off --for 30m --reason "false denials, see #inc-42"
  caddy stripe-ratelimit switch --pool api --kind rate enforce 5 --for 2h --reason "launch"
  caddy stripe-ratelimit switch --pool api --kind workers dark --for 1h --reason "load test" --scope instance
  caddy stripe-ratelimit switch --all clear`,
		Args: cobra.MaximumNArgs(2),
		RunE: run(func(c *client, args []string) error {
			if len(args) == 0 {
				var list struct{ Switches []control.Switch }
				if told, err := c.call(http.MethodGet, "switches", nil, &list); told || err != nil {
					return err
				}
				printSwitches(c.cmd.OutOrStdout(), list.Switches)
				return nil
			}
			in := switchRequest{targetRequest: c.target(), All: c.flag("all") == "true", Scope: c.flag("scope")}
			if !in.All && in.targetRequest == (targetRequest{}) {
				return errors.New("which limits? Use --all, or --pool, --kind and --limit")
			}
			method := http.MethodDelete
			if args[0] != "clear" || len(args) > 1 {
				var err error
				method, in.Mode = http.MethodPost, strings.Join(args, " ")
				if in.noteRequest, err = c.note(); err != nil {
					return err
				}
			}
			return c.change(method, "switches", in)
		}),
	}
	cmd.Flags().Bool("all", false, "Every limit of every pool")
	targetFlags(cmd)
	noteFlags(cmd)
	cmd.Flags().String("scope", "fleet", "fleet, or instance for this instance alone")
	cmd.MarkFlagsMutuallyExclusive("all", "pool")
	return cmd
}

// change asks for a change and says how far it has come.
func (c *client) change(method, path string, in any) error {
	var answer changeAnswer
	told, err := c.call(method, path, in, &answer)
	if err != nil {
		return err
	}
	if !told {
		c.printf("%s\n", answer.Message)
	}
	if answer.Pending != "" {
		return errPending
	}
	return nil
}

func overrideCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "override [set|clear] --pool <pool> --kind <kind> --limit <limit> (--identity <hash> | --key-file <file>)",
		Short: "Gives one client other numbers, for a while; without arguments lists the overrides",
		Long: `
Raises or lowers a limit for one client on every instance, at once and without
a reload. The period and the lease stay those of the limit. It ends by itself.`,
		Example: `  caddy stripe-ratelimit override set --pool api --kind rate --limit rate --identity 9f86d081884c7d659a2feaa0c55ad015 \
      --requests 500 --burst 2500 --for 3d --reason "migration, ticket 4711"
  caddy stripe-ratelimit override set --pool api --kind concurrency --limit concurrency --key-file key.txt \
      --capacity 100 --for 8h --reason "batch of the month"
  pass show customer/key | caddy stripe-ratelimit override clear --pool api --kind rate --limit rate --key-file -
  caddy stripe-ratelimit override`,
		RunE: run(func(c *client, _ []string) error {
			var list struct{ Overrides []control.Override }
			if told, err := c.call(http.MethodGet, "overrides", nil, &list); told || err != nil {
				return err
			}
			c.printOverrides(list.Overrides)
			return nil
		}),
		Args: cobra.NoArgs,
	}
	set := &cobra.Command{
		Use:   "set",
		Short: "Sets an override",
		Args:  cobra.NoArgs,
		RunE: run(func(c *client, _ []string) error {
			id, err := c.identity()
			if err != nil {
				return err
			}
			note, err := c.note()
			if err != nil {
				return err
			}
			in := overrideRequest{targetRequest: c.target(), identityRequest: id, noteRequest: note}
			for name, field := range map[string]*int64{"requests": &in.Requests, "burst": &in.Burst, "capacity": &in.Capacity} {
				*field, _ = c.cmd.Flags().GetInt64(name) // which is a flag, and a number
			}
			return c.change(http.MethodPost, "overrides", in)
		}),
	}
	set.Flags().Int64("requests", 0, "Of rate: requests in the limit's own period")
	set.Flags().Int64("burst", 0, "Of rate: what a full bucket holds")
	set.Flags().Int64("capacity", 0, "Of concurrency: requests in progress")
	noteFlags(set)
	clear := &cobra.Command{
		Use:   "clear",
		Short: "Ends an override",
		Args:  cobra.NoArgs,
		RunE: run(func(c *client, _ []string) error {
			id, err := c.identity()
			if err != nil {
				return err
			}
			return c.change(http.MethodDelete, "overrides", overrideRequest{targetRequest: c.target(), identityRequest: id})
		}),
	}
	for _, sub := range []*cobra.Command{set, clear} {
		targetFlags(sub)
		identityFlags(sub)
	}
	cmd.AddCommand(set, clear)
	return cmd
}

func inspectCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect [--pool <pool>] (--identity <hash> | --key-file <file>)",
		Short: "Shows what one client has left, and takes nothing",
		Example: `  caddy stripe-ratelimit inspect --pool api --identity 9f86d081884c7d659a2feaa0c55ad015
  pass show customer/key | caddy stripe-ratelimit inspect --pool api --key-file -`,
		Args: cobra.NoArgs,
		RunE: run(func(c *client, _ []string) error {
			id, err := c.identity()
			if err != nil {
				return err
			}
			var found inspection
			told, err := c.call(http.MethodPost, "keys/inspect", keyRequest{Pool: c.flag("pool"), identityRequest: id}, &found)
			if told || err != nil {
				return err
			}
			c.printInspection(found)
			return nil
		}),
	}
	cmd.Flags().String("pool", "", "Only this pool")
	identityFlags(cmd)
	return cmd
}

func resetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reset [--pool <pool>] (--identity <hash> | --key-file <file>)",
		Short: "Fills the buckets of one client up",
		Long: `
Fills the buckets of one client up, so that its next request is allowed, on
every instance; while the store fails, what this instance decides by alone. With --leases its concurrency slots are freed, too; those of
requests that still run are taken again within a third of their lease.`,
		Example: `  caddy stripe-ratelimit reset --pool api --identity 9f86d081884c7d659a2feaa0c55ad015 --reason "ticket 4711"`,
		Args:    cobra.NoArgs,
		RunE: run(func(c *client, _ []string) error {
			id, err := c.identity()
			if err != nil {
				return err
			}
			in := resetRequest{keyRequest: keyRequest{Pool: c.flag("pool"), identityRequest: id}, Leases: c.flag("leases") == "true"}
			if in.Reason, in.Actor, err = c.reason(); err != nil {
				return err
			}
			return c.change(http.MethodPost, "keys/reset", in)
		}),
	}
	cmd.Flags().String("pool", "", "Only this pool")
	cmd.Flags().Bool("leases", false, "Free its concurrency slots, too")
	reasonFlags(cmd)
	identityFlags(cmd)
	return cmd
}

func statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status [--pool <pool>] [--watch]",
		Short: "Shows what is in force, how often it triggered, and how the store does",
		Long: `
Shows what is in force, how often each limit has triggered since Caddy began, the
shed level, the fleet and the store, as this instance knows them. Lines that begin
with ! come first: they are what is not as it should be.`,
		Example: `  caddy stripe-ratelimit status
  caddy stripe-ratelimit status --pool api --watch
  caddy stripe-ratelimit status --json | jq '.pools[].workers.level'`,
		Args: cobra.NoArgs,
		RunE: run(func(c *client, _ []string) error {
			if c.flag("watch") == "true" {
				return c.watch()
			}
			var now status
			told, err := c.call(http.MethodGet, "status", nil, &now)
			if told || err != nil {
				return err
			}
			text, err := statusText(&now, c.flag("pool"), nil)
			c.printf("%s", text)
			return err
		}),
	}
	cmd.Flags().String("pool", "", "Only this pool")
	cmd.Flags().BoolP("watch", "w", false, "Show it anew each second, with rates, until interrupted")
	return cmd
}

// watch shows the status each second, until it is interrupted or fails at once.
func (c *client) watch() error {
	var before *status
	for {
		now := new(status)
		told, err := c.call(http.MethodGet, "status", nil, now)
		switch {
		case err != nil && before == nil:
			return err
		case err != nil: // it may come back, from a restart
			c.show(fmt.Sprintf("! %v\n", err))
		case !told:
			if before == nil {
				before = &status{}
			}
			text, err := statusText(now, c.flag("pool"), before)
			if err != nil {
				return err
			}
			c.show(fmt.Sprintf("%s  %s\n\n%s", now.Time.Local().Format(time.TimeOnly), c.address, text))
			before = now
		}
		select {
		case <-c.cmd.Context().Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}
