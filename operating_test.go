// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
)

// Every command line of the documentation is one that the command takes. It is
// copied in a hurry.
func TestDocs_Commands(t *testing.T) {
	line := regexp.MustCompile(`(?m)^\s*(?:.* \| )?caddy stripe-ratelimit (.*)$`)
	word := regexp.MustCompile(`"[^"]*"|\S+`)
	tried := 0
	for file, text := range readDocs(t) {
		for _, m := range line.FindAllStringSubmatch(text, -1) {
			if strings.ContainsAny(m[1], "<[`") { // syntax, or prose
				continue
			}
			tried++
			var args []string
			for _, w := range word.FindAllString(strings.Split(m[1], " | ")[0], -1) {
				args = append(args, strings.Trim(w, `"`))
			}
			root := &cobra.Command{Use: "stripe-ratelimit"}
			caddycmd.Commands()["stripe-ratelimit"].CobraFunc(root)
			cmd, rest, err := root.Find(args)
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			if err == nil {
				err = cmd.ValidateArgs(cmd.Flags().Args())
			}
			if words := cmd.Flags().Args(); err == nil && cmd.Name() == "switch" && len(words) > 0 && words[0] != "clear" {
				_, err = control.ParseMode(strings.Join(words, " "))
			}
			if err == nil && !cmd.Runnable() {
				err = errors.New("it does nothing")
			}
			if err != nil {
				t.Errorf("%s: %s: %v", file, m[0], err)
			}
		}
	}
	if tried < 10 {
		t.Errorf("tried %d commands, want all of docs/operating.md", tried)
	}
}
