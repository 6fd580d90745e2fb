// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// client asks the admin API of one instance.
type client struct {
	cmd     *cobra.Command
	address string
	json    bool
}

// run makes a function of a command. Its mistakes are told in one line.
func run(do func(c *client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		cmd.SilenceUsage = true
		address, err := adminAddress(cmd)
		if err != nil {
			return err
		}
		err = do(&client{cmd: cmd, address: address, json: cmd.Flag("json").Value.String() == "true"}, args)
		if !errors.Is(err, errPending) {
			return err
		}
		cmd.SilenceErrors = true
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return exitPending, nil })(cmd, args)
	}
}

// adminAddress is where the admin API is by the flags of a command.
func adminAddress(cmd *cobra.Command) (string, error) {
	flag := func(name string) string { return cmd.Flag(name).Value.String() }
	address, file := flag("address"), flag("config")
	var config []byte
	if address == "" && file != "" {
		var err error
		if config, _, _, err = caddycmd.LoadConfig(file, flag("adapter")); err != nil {
			return "", err
		}
		var parsed struct{ Admin caddy.AdminConfig }
		if json.Unmarshal(config, &parsed) == nil && parsed.Admin.Disabled {
			return "", fmt.Errorf("%s has `admin off`, so there is nobody to ask. Write `mode off` into its stripe_ratelimit, and restart Caddy", file)
		}
	}
	address, err := caddycmd.DetermineAdminAPIAddress(address, config, file, flag("adapter"))
	if err == nil && strings.HasPrefix(address, "/") {
		err = fmt.Errorf("%[1]s is no address; that of a Unix socket is unix/%[1]s", address)
	}
	return address, err
}

// errPending makes the command exit with exitPending.
var errPending = errors.New("not in the store yet")

// refused is how caddycmd.AdminAPIRequest words an answer that is an error.
var refused = regexp.MustCompile(`(?s)^caddy responded with error: HTTP (\d+): (.*)$`)

// call sends a request to the admin API and reads the answer into out. With
// --json it prints the answer instead, and told is true.
func (c *client) call(method, path string, in, out any) (told bool, err error) {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return false, err
		}
		body = bytes.NewReader(text)
	}
	text, err := c.ask(method, path, body)
	if err != nil {
		return false, c.explain(err)
	}
	if err := json.Unmarshal(text, out); err != nil {
		return false, fmt.Errorf("the answer of %s makes no sense: %w", c.address, err)
	}
	if !c.json {
		return false, nil
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, text, "", "  "); err != nil {
		return false, err
	}
	c.printf("%s\n", bytes.TrimSpace(indented.Bytes()))
	return true, nil
}

// askTimeout is how long an answer is waited for. The admin API itself waits for
// the store for changeTimeout.
const askTimeout = 10 * time.Second

// ask returns the body of an answer. A Caddy that hangs must not hang those who
// ask it, and Caddy's client has no timeout.
func (c *client) ask(method, path string, body io.Reader) ([]byte, error) {
	type answer struct {
		text []byte
		err  error
	}
	answered := make(chan answer, 1)
	go func() {
		resp, err := caddycmd.AdminAPIRequest(c.address, method, adminBase+path, nil, body)
		if err != nil {
			answered <- answer{nil, err}
			return
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		answered <- answer{text, err}
	}()
	select {
	case a := <-answered:
		return a.text, a.err
	case <-time.After(askTimeout):
		return nil, fmt.Errorf("no answer within %v", askTimeout)
	}
}

// requested is how caddycmd.AdminAPIRequest begins to tell of an answer that did
// not come.
var requested = regexp.MustCompile(`^performing request: \w+ "[^"]*": `)

// explain says what to do about a failed request.
func (c *client) explain(err error) error {
	match := refused.FindStringSubmatch(err.Error())
	if match == nil {
		return fmt.Errorf("no admin API at %s (%s). Is Caddy running, and is this its address? Use --address or --config. "+
			"With `admin off` there is none: write `mode off` into the config, and restart Caddy", c.address, requested.ReplaceAllString(err.Error(), ""))
	}
	var answer struct{ Error string }
	if json.Unmarshal([]byte(match[2]), &answer) == nil && answer.Error != "" {
		return errors.New(answer.Error)
	}
	if match[1] == "404" {
		return fmt.Errorf("the Caddy at %s has no module stripe_ratelimit, or an older one", c.address)
	}
	return err
}

func (c *client) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(c.cmd.OutOrStdout(), format, args...)
}
