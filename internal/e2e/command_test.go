// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/caddyproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// command runs `caddy stripe-ratelimit` on a Caddy, with something on its
// standard input.
func (c *caddy) command(t testing.TB, stdin string, args ...string) (out string, code int) {
	t.Helper()
	cmd := caddyproc.Command(t, t.TempDir(), append([]string{"stripe-ratelimit", "--address", c.Admin}, args...)...)
	var text bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &text, &text
	var failed *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	return text.String(), cmd.ProcessState.ExitCode()
}

// golden takes out of an output what differs between runs, and the width of
// columns with it.
func golden(text string) string {
	for expr, is := range map[string]string{
		`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(in [^)]*\)`: "TIME",
		` {2,}`:   "  ",
		`(?m) +$`: "",
		`\b1[01][0-9]{3}m?s\b|\b1?[0-9]m[0-9.]+s\b`:             "MINUTES",
		`[A-Za-z0-9_-]{22}  (not known|now|\d+m?s)  [0-9.]+m?s`: "INSTANCE  AGE  END",
		`level -?0\.\d\d`:       "level LEVEL",
		`own \d+, this one \d+`: "own N, this one N",
	} {
		text = regexp.MustCompile(expr).ReplaceAllString(text, is)
	}
	return strings.TrimSpace(text)
}

func TestCommand(t *testing.T) {
	redis := redistest.Start(t)
	site := `@charges path /charges
	stripe_ratelimit api {
		critical @charges
		rate 6/h burst 2
		concurrency 3
		fleet 100 reserve 20%
		workers 10 good 70% bad 80%
	}
	respond ok`
	c := start(t, config{redis: redis.Addr, site: site})
	for _, status := range []int{200, 200, 429} {
		c.get(t, "/", bearer("sk_live_4eC39HqLyjWDarjtT1zdp7dc")...).want(t, status)
	}
	eventually(t, patience, "known how busy it is", func() bool { return c.metric(t, "worker_utilization") >= 0 })
	keyFile := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(keyFile, []byte("sk_live_4eC39HqLyjWDarjtT1zdp7dc\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	rows := []struct {
		args  string // by spaces; KEY is the key's file, _ in a reason a space
		stdin string
		code  int
		want  string
	}{
		{"switch", "", 0, `Switches  none; all is as the config has it`},
		{"override", "", 0, `Overrides  none`},

		// A mistake changes nothing and says what to do.
		{"switch --all off --for 1h", "", 1, `Error: --reason is missing: say why, for those who find it. Such as --reason "INC-123"`},
		{"switch --pool apo off --for 1h --reason test", "", 1,
			`Error: there is no target 'apo'; there are api/rate/rate, api/concurrency/concurrency, api/fleet, api/workers`},
		{"switch --all --pool api off --for 1h --reason test", "", 1,
			`Error: if any flags in the group [all pool] are set none of the others can be; [all pool] were all set`},
		{"switch --all off --reason test", "", 1, `Error: --for is missing: when does it end by itself? Such as --for 30m`},
		{"switch off --for 1h --reason test", "", 1, `Error: which limits? Use --all, or --pool, --kind and --limit`},
		{"switch --all clear", "", 1, `Error: there is nothing to clear: none is set for exactly this target and scope; nothing is in force`},
		{"status --pool apo", "", 1, `Error: there is no pool 'apo'; there are api`},
		{"stats", "", 1, `Error: there is no command 'stats'; there are status, switch, inspect, reset and override`},
		{"inspect", "", 1, `Error: at least one of the flags in the group [identity key-file] is required`},
		{"switch", "", 0, `Switches  none; all is as the config has it`},

		{"switch --all off --for 30m --reason INC-123 --actor anna", "", 0, `everything is off for 30m on every instance within half a second.`},
		{"switch --pool api --kind rate dark --for 2h --reason launch --actor anna --scope instance", "", 0, `api/rate is dark for 2h on this instance.`},
		{"switch --pool api clear", "", 1, `Error: there is nothing to clear: none is set for exactly this target and scope; in force are everything (scope fleet), api/rate (scope instance)`},
		{"status", "", 0, `
! EVERY LIMIT IS OFF by a switch
Store  redis, 1 instance
Switches
  TARGET  MODE  SCOPE  ENDS  ACTOR  REASON
  everything  off  fleet  TIME  anna  INC-123
  api/rate  dark  instance  TIME  anna  launch

Pool api: 0 critical and 0 other requests in progress
  LIMIT  NUMBERS  MODE  ALLOWED  REJECTED  WOULD REJECT  ERRORS
  rate  6/h burst 2  OFF (switch)  2  1  0  0
  concurrency  3 in progress  OFF (switch)  3  0  0  0
  fleet  100 in progress fleet-wide, 80 for non-critical  OFF (switch)  3  0  0  0
  workers  10 on this instance  OFF (switch)  3  0  0  0
  workers: utilization 0%, level LEVEL, sheds nothing
  fleet: 1 instance; 0 of 80 slots for non-critical requests in use, instances own N, this one N; 0 critical requests`},
		{"switch --pool api --kind rate --limit rate enforce 5 --for 1h --reason launch", "", 0, `api/rate/rate is enforced for 5% of the identities for 1h on every instance within half a second.`},
		{"switch --all clear", "", 0, `every switch is cleared on every instance within half a second.`},
		{"switch --pool api --kind rate clear --scope instance", "", 0, `the switch of api/rate is cleared on this instance.`},

		{"inspect --key-file KEY", "", 0, `
Identity d08c8b9a3c0c0b0e7c6a4f6f1f0e0f0e
  LIMIT  IN FORCE  LEFT  NEXT ALLOWED  NOTE
  api/rate/rate  6/h burst 2  0 of 2 tokens  MINUTES
  api/concurrency/concurrency  3 in progress  3 of 3 slots  now`},
		{"override set --pool api --kind rate --limit rate --key-file KEY --requests 60 --for 4h --reason INC-123 --actor anna", "", 0,
			`api/rate/rate is overridden for IDENTITY, for 4h, on every instance within half a second.`},
		{"override", "", 0, `
Overrides
  TARGET  IDENTITY  NUMBERS  ENDS  ACTOR  REASON
  api/rate/rate  IDENTITY  60 requests a period, burst 20  TIME  anna  INC-123`},
		{"reset --key-file KEY --reason INC-123", "", 0, `the buckets of IDENTITY are full on every instance within half a second.`},
		{"inspect --key-file -", "sk_live_4eC39HqLyjWDarjtT1zdp7dc", 0, `
Identity IDENTITY
  LIMIT  IN FORCE  LEFT  NEXT ALLOWED  NOTE
  api/rate/rate  60/h burst 20  20 of 20 tokens  now  overridden until TIME
  api/concurrency/concurrency  3 in progress  3 of 3 slots  now`},
		{"override clear --pool api --kind rate --limit rate --key-file KEY", "", 0,
			`the override of api/rate/rate for IDENTITY is cleared on every instance within half a second.`},
	}
	identity := regexp.MustCompile(`\b[0-9a-f]{32}\b`)
	for _, row := range rows {
		args := strings.Fields(strings.ReplaceAll(row.args, "KEY", keyFile))
		out, code := c.command(t, row.stdin, args...)
		got := identity.ReplaceAllString(golden(out), "IDENTITY")
		want := identity.ReplaceAllString(strings.TrimSpace(row.want), "IDENTITY")
		if diff := cmp.Diff(want, got); diff != "" || code != row.code {
			t.Errorf("%s: got exit code %d, want %d (-want +got):\n%s", row.args, code, row.code, diff)
		}
		if strings.Contains(out, "4eC39HqLyjWDarjtT1zdp7dc") {
			t.Errorf("%s: tells the key:\n%s", row.args, out)
		}
	}

	out, code := c.command(t, "", "status", "--json")
	var status struct {
		Pools []struct{ Pool string }
	}
	if err := json.Unmarshal([]byte(out), &status); err != nil || code != 0 || len(status.Pools) != 1 || status.Pools[0].Pool != "api" {
		t.Errorf("status --json: got exit code %d, %v\n%s", code, err, out)
	}
	if strings.Contains(c.Logs(), "4eC39HqLyjWDarjtT1zdp7dc") {
		t.Error("a key is in the log")
	}

	// With Redis gone a change is in force here, and says so.
	redis.Kill()
	out, code = c.command(t, "", "switch", "--all", "off", "--for", "1h", "--reason", "Redis is gone")
	if want := "everything is off for 1h on this instance ALONE so far: the store does not answer ("; code != 4 || !strings.HasPrefix(out, want) {
		t.Errorf("switch without Redis: got exit code %d, want 4\n%s\nwant %s…", code, out, want)
	}
	eventually(t, patience, "known to be failing", func() bool { return c.metric(t, "store_breaker_open") == 1 })
	out, code = c.command(t, "", "status")
	for _, want := range []string{
		"! REDIS FAILS (" + redis.Addr + "): on_store_error says what becomes of requests; switches stay in force\n",
		"\n! 1 change waits for Redis: so far in force on this instance alone\n",
		"\n! EVERY LIMIT IS OFF by a switch\n",
		"\nStore      redis, 1 instance, FAILS\n",
	} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("status without Redis: got exit code %d, want 0\n%s\nwant … %s …", code, out, want)
		}
	}
	out, _ = c.command(t, "", "status", "--json")
	var failing struct {
		Store struct {
			Error   string
			Failing []string
			Waiting int
		}
	}
	if err := json.Unmarshal([]byte(out), &failing); err != nil || failing.Store.Error == "" || failing.Store.Waiting != 1 || len(failing.Store.Failing) != 1 {
		t.Errorf("status --json without Redis: got %+v, %v\n%s", failing, err, out)
	}
	out, code = c.command(t, "", "inspect", "--key-file", keyFile)
	if want := "Error: the store does not answer"; code != 1 || !strings.HasPrefix(out, want) {
		t.Errorf("inspect without Redis: got exit code %d, want 1\n%s\nwant %s…", code, out, want)
	}

	c.Admin = "127.0.0.1:" + strconv.Itoa(caddyproc.FreePort(t))
	out, code = c.command(t, "", "status")
	if want := "Error: no admin API at " + c.Admin; code != 1 || !strings.HasPrefix(out, want) || !strings.Contains(out, "mode off") {
		t.Errorf("status of nobody: got exit code %d, want 1\n%s\nwant %s…", code, out, want)
	}
}

// The admin API is where the config says, and if it is nowhere, the command says
// that rather than ask another Caddy.
func TestCommand_Address(t *testing.T) {
	dir, err := os.MkdirTemp("", "admin-") // that of a test is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	c := start(t, config{global: "admin unix/" + socket, site: "stripe_ratelimit api {\n rate 1/h \n}\n respond ok"})
	write := func(global string) string {
		file := filepath.Join(t.TempDir(), "Caddyfile")
		if err := os.WriteFile(file, []byte("{\n\t"+global+"\n}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	cases := []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--address", "unix/" + socket}, 0, "Store      memory"},
		{[]string{"--config", write("admin unix/" + socket)}, 0, "Store      memory"},
		{[]string{"--address", socket}, 1, "Error: " + socket + " is no address; that of a Unix socket is unix/" + socket},
		{[]string{"--config", write("admin off")}, 1, "has `admin off`, so there is nobody to ask. Write `mode off` into its stripe_ratelimit, and restart Caddy"},
		{[]string{"--config", write("admin unix/" + socket + "2")}, 1, "Error: no admin API at unix/" + socket + "2 (dial unix "},
	}
	for _, row := range cases {
		cmd := caddyproc.Command(t, t.TempDir(), append([]string{"stripe-ratelimit", "status"}, row.args...)...)
		cmd.Env = append(cmd.Env, "CADDY_ADMIN="+c.Admin)
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != row.code || !strings.Contains(string(out), row.want) {
			t.Errorf("%v: got exit code %d, want %d\n%s\nwant … %s …", row.args, code, row.code, out, row.want)
		}
	}
}
