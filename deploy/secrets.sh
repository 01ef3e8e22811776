#!/bin/sh
# Make the secrets of a deployment in a folder, by default deploy/secrets; those that are there are kept.
set -eu
folder=${1:-"$(dirname "$0")/secrets"}
mkdir -p -m 700 "$folder" # the files themselves are read by the users of containers
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
keep() {
  [ -e "$folder/$1" ] && return
  printf '%s\n' "$2" >"$folder/.$1"
  chmod 444 "$folder/.$1"
  mv "$folder/.$1" "$folder/$1"
}
keep redis_url "redis://:$(random)@redis:6379/0"
keep flower_auth "kvrelay:$(random)"
keep grafana_password "$(random)"
keep api_key "" # a key of 16 characters and more that clients must send; empty: whoever reaches the port may call
