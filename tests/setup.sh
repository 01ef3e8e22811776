#!/bin/sh
# Install what the tests need beyond the Python packages: Debian's Redis, beside the Valkey that comes with them, its
# Chromium, which looks at the console page, iproute2, which makes several hosts of one, its Prometheus, and two shells.
set -u
missing=""
command -v redis-server >/dev/null || missing="redis-server"
command -v chromium >/dev/null || missing="$missing chromium"
command -v tc >/dev/null || missing="$missing iproute2"
command -v prometheus >/dev/null || missing="$missing prometheus"
command -v zsh >/dev/null || missing="$missing zsh"
command -v fish >/dev/null || missing="$missing fish"
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null || exit 0 # the tests that need them say that they were skipped
as_root=""
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || { echo "missing: apt install $missing"; exit 0; }
    as_root="sudo -n"
fi
install="$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing"
# Redis and Prometheus start servers of their own where there is a service manager. The tests use other ports.
$install >/dev/null 2>&1 || { $as_root apt-get update -qq && $install >/dev/null; } ||
    echo "could not be installed: $missing. What needs it is skipped, or fails where CI is set"
exit 0
