#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs with apt-get or brew what tests need and this machine lacks:
#
#   tools/need.sh redis libfaketime prometheus node npm
set -euo pipefail

cd "$(dirname "$0")/.."

have() {
	case $1 in
	redis) command -v redis-server >/dev/null ;;
	libfaketime)
		compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null ||
			compgen -G "${HOMEBREW_PREFIX:-/opt/homebrew}/lib/faketime/libfaketime.*.dylib" >/dev/null
		;;
	prometheus) [ -x bin/promtool ] || command -v promtool >/dev/null ;;
	*) command -v "$1" >/dev/null ;;
	esac
}

sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
updated=

install() {
	if command -v apt-get >/dev/null; then
		case $1 in
		redis) set -- redis-server ;;
		node) set -- nodejs ;;
		esac
		[ "$updated" ] || $sudo apt-get update -qq
		updated=1
		if [ "$1" = prometheus ]; then
			unpack prometheus
			return
		fi
		# RUNLEVEL=1 keeps Debian from starting a Redis of its own.
		$sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
			apt-get install -y -qq --no-install-recommends "$1"
	elif command -v brew >/dev/null; then
		brew install "$1"
	else
		echo "need.sh: please install $1" >&2
		return 1
	fi
}

# unpack takes the programs out of a Debian package, into bin/. Installed, the
# package would run a Prometheus on port 9090 wherever there is systemd.
unpack() {
	local dir
	dir=$(mktemp -d)
	(cd "$dir" && apt-get download -qq "$1" && dpkg -x ./*.deb .)
	mkdir -p bin
	mv "$dir"/usr/bin/* bin/
	rm -r "$dir"
}

# One by one: with some Debian sources nodejs brings npm and excludes Debian's.
for thing in "$@"; do
	have "$thing" || install "$thing"
done
