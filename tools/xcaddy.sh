#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds Caddy with the module of this checkout, as a user of xcaddy would, and
# checks that the binary lists it.
#
#   tools/xcaddy.sh [output]      default: bin/caddy-xcaddy
set -eu

output=${1:-}
case $output in "" | /*) ;; *) output=$PWD/$output ;; esac
cd "$(dirname "$0")/.."
output=${output:-$PWD/bin/caddy-xcaddy}

go build -C tools -o ../bin/ github.com/caddyserver/xcaddy/cmd/xcaddy
xcaddy=$PWD/bin/xcaddy
module=$(go list -m)
caddy=$(go list -m -f '{{.Version}}' github.com/caddyserver/caddy/v2)

# Even for a module that it replaces by a folder, xcaddy lets Go ask the proxy
# for the module's versions. This folder answers, so that a checkout builds
# before it is published, and is asked before the proxies in use.
proxy=$(mktemp -d)
trap 'rm -rf "$proxy"' EXIT
mkdir -p "$proxy/$module/@v"
echo v0.0.0 >"$proxy/$module/@v/list"
echo '{"Version":"v0.0.0"}' >"$proxy/$module/@v/v0.0.0.info"
cp go.mod "$proxy/$module/@v/v0.0.0.mod"

GOPROXY="file://$proxy,$(go env GOPROXY)" \
	"$xcaddy" build "$caddy" --with "$module=." --output "$output"

"$output" list-modules | grep -x http.handlers.stripe_ratelimit
