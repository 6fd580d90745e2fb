// SPDX-License-Identifier: Apache-2.0

// Command caddy is Caddy with its standard modules and stripe_ratelimit, for
// people without xcaddy.
package main

import (
	_ "time/tzdata"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/stripe-ratelimit/caddy-stripe-ratelimit"
)

func main() {
	caddycmd.Main()
}
