#!/usr/bin/env bash
# A Docker engine for `make compose-test`, for a machine that has none: Debian's, and where no image registry is
# reached a base image made from Debian's packages.
#     engine.sh start | stop        exit status 77: none can be had here, and why
# One that runs already is used, and left alone by `stop`.
set -euo pipefail
cd "$(dirname "$0")/../.."
state=$PWD/build/engine
base=${BASE:-python:3.11-slim-bookworm}

cannot() { echo "no Docker engine: $*" >&2; exit 77; }

install_packages() { # NAME=COMMAND...: the packages whose commands are missing
    local wanted=() each
    for each in "$@"; do command -v "${each#*=}" >/dev/null || wanted+=("${each%=*}"); done
    ((${#wanted[@]})) || return 0
    command -v apt-get >/dev/null || cannot "${wanted[*]} must be installed"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${wanted[@]}"; } >"$state/apt.log" 2>&1 ||
        cannot "${wanted[*]} could not be installed: $(tail -n 1 "$state/apt.log")"
}

start_engine() {
    [[ $(id -u) == 0 ]] || cannot "none runs, and only root can start one"
    install_packages docker.io=dockerd iptables=iptables
    if ! mountpoint -q /sys/fs/cgroup; then
        install_packages cgroupfs-mount=cgroupfs-mount
        cgroupfs-mount || cannot "control groups cannot be mounted"
    fi
    setsid nohup dockerd --host "${DOCKER_HOST:-unix:///var/run/docker.sock}" --data-root "$state/data" \
        --exec-root "$state/exec" --pidfile "$state/pid" >"$state/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        sleep 0.5
    done
    tail -n 3 "$state/dockerd.log" >&2
    stop_engine
    cannot "dockerd does not start"
}

stop_engine() {
    [[ -f $state/pid ]] || return 0
    local pid
    pid=$(cat "$state/pid")
    kill "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
    rm -rf "$state"
}

import_base() { # what the official image has, as far as the Dockerfile needs it
    local root=$state/rootfs changes=()
    install_packages debootstrap=debootstrap
    debootstrap --variant=minbase --include=python3-venv,python3-pip,python3-dev,ca-certificates bookworm "$root" \
        >"$state/debootstrap.log" 2>&1 || cannot "no base image: $(tail -n 1 "$state/debootstrap.log")"
    rm -rf "$root"/usr/lib/python3*/EXTERNALLY-MANAGED "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    changes=(--change "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_ROOT_USER_ACTION=ignore")
    if [[ -d ${PIP_FIND_LINKS:-} ]]; then
        mkdir "$root/opt/wheels"
        cp "$PIP_FIND_LINKS"/torch-*.whl "$root/opt/wheels/" 2>/dev/null || true
        changes+=(--change "ENV PIP_FIND_LINKS=/opt/wheels")
    fi
    tar -C "$root" -c . | docker import "${changes[@]}" - "$base" >/dev/null
    rm -rf "$root"
}

case ${1:-start} in
start)
    mkdir -p "$state"
    docker info >/dev/null 2>&1 || start_engine
    docker compose version >/dev/null 2>&1 || install_packages docker-compose=docker-compose
    docker image inspect "$base" >/dev/null 2>&1 || docker pull -q "$base" >/dev/null 2>&1 || import_base
    ;;
stop) stop_engine ;;
esac
