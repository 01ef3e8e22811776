#!/bin/sh
# Install what the tests need beyond the Python packages: Debian's Redis, beside the Valkey that comes with them.
set -u
command -v redis-server >/dev/null && exit 0
command -v apt-get >/dev/null || exit 0 # the tests on Redis say that they were skipped
as_root=""
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || { echo "redis-server is missing: apt install redis-server"; exit 0; }
    as_root="sudo -n"
fi
install="$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server"
# The package starts a server of its own where there is a service manager. The tests use other ports.
$install >/dev/null 2>&1 || { $as_root apt-get update -qq && $install >/dev/null; } ||
    echo "redis-server could not be installed: tests on Redis are skipped, or fail where CI is set"
exit 0
