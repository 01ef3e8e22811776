"""A network of hosts on one machine: namespaces joined by a router, whose cables can be cut.

A host has an address, a hostname, processes, shared memory and a /proc of its own: no memory is shared with
another, and none sees another's processes. They share the kernel, and with it the clock.
"""

import contextlib
import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from app.launch.supervisor import die_with_parent
from tests.processes import until

_SLOTS = 32  # networks that may be there at a time
_INIT = (
    "hostname $0; mount -t tmpfs tmpfs /dev/shm; ip link set lo up; exec sleep infinity"  # the first process
)
BURST_BYTES = 65_536


def unable() -> str | None:
    """Why there can be no such network here."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)}: apt install iproute2 util-linux"
    probe = f"kvr-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except RuntimeError as error:
        return f"network namespaces cannot be made: {error}"
    return None


class Host:
    """`address` is reached from all other hosts and from the machine itself."""

    def __init__(self, network: "Network", name: str, number: int) -> None:
        self.name = name
        self.address = f"{network.prefix}.{network.base + number}.2"
        self._namespace = f"{network.name}-{name}"
        self._router = network.router
        self._cable = f"v{number}"
        gateway = f"{network.prefix}.{network.base + number}.1"
        _run("ip", "netns", "add", self._namespace)
        far = ("peer", "name", "eth0", "netns", self._namespace)
        _run("ip", "-n", self._router, "link", "add", self._cable, "type", "veth", *far)
        _run("ip", "-n", self._router, "addr", "add", f"{gateway}/24", "dev", self._cable)
        _run("ip", "-n", self._router, "link", "set", self._cable, "up")
        _run("ip", "-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.connect()
        unshare = ("unshare", "--pid", "--uts", "--ipc", "--kill-child", "--mount-proc")
        parent = os.getpid()
        self._unshare = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace, *unshare, "sh", "-c", _INIT, name],
            preexec_fn=lambda: die_with_parent(parent),
        )
        self._init = until(lambda: first_child(self._unshare.pid), f"host {name} is up")
        until(lambda: b"sleep" in Path(f"/proc/{self._init}/cmdline").read_bytes(), f"host {name} is up")

    def inside(self) -> tuple[str, ...]:
        """Put before a command, this makes it run here; its process is the first child of what is started."""
        enter = ("--net", "--pid", "--uts", "--ipc", "--mount", "--wd=.")
        return ("nsenter", "--target", str(self._init), *enter)

    def cut(self) -> None:
        """Pull the cable."""
        _run("ip", "-n", self._namespace, "link", "set", "eth0", "down")

    def connect(self) -> None:
        """Plug it in again: the routes went with it."""
        gateway = self.address.removesuffix("2") + "1"
        _run("ip", "-n", self._namespace, "link", "set", "eth0", "up")
        _run("ip", "-n", self._namespace, "route", "replace", "default", "via", gateway)

    def slow(self, mbit_per_s: int | None) -> None:
        """Bound what this host sends; None: no bound."""
        if mbit_per_s is None:
            _run("tc", "-n", self._namespace, "qdisc", "del", "dev", "eth0", "root")
            return
        rate = ("rate", f"{mbit_per_s}mbit", "burst", str(BURST_BYTES), "latency", "100ms")
        _run("tc", "-n", self._namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    def sent_bytes(self) -> int:
        """By this host, since it is up."""
        links = json.loads(_run("ip", "-n", self._namespace, "-j", "-s", "link", "show", "eth0"))
        return int(links[0]["stats64"]["tx"]["bytes"])

    def die(self) -> None:
        """Power off: every process of it is killed, and the address is gone."""
        self._unshare.kill()
        self._unshare.wait()
        with contextlib.suppress(RuntimeError):
            _run("ip", "netns", "del", self._namespace)


class Network:
    """Made when it is entered; when it is left, hosts and their processes are gone."""

    prefix = "198.18"  # meant for tests of networks, and routed nowhere

    def __init__(self) -> None:
        self.name = f"kvr-{os.getpid()}"
        self.router = f"{self.name}-router"
        self.hosts: list[Host] = []
        slot = os.getpid() % _SLOTS
        self.base = slot * (256 // _SLOTS)
        self._uplink = f"kvr{slot}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._remove)
            _run("ip", "netns", "add", self.router)
            forward = "echo 1 >/proc/sys/net/ipv4/ip_forward"
            _run("ip", "netns", "exec", self.router, "sh", "-c", forward)
            far = ("peer", "name", "uplink", "netns", self.router)
            _run("ip", "link", "add", self._uplink, "type", "veth", *far)
            _run("ip", "addr", "add", f"{self.prefix}.{self.base}.2/24", "dev", self._uplink)
            _run("ip", "link", "set", self._uplink, "up")
            _run("ip", "-n", self.router, "addr", "add", f"{self.prefix}.{self.base}.1/24", "dev", "uplink")
            _run("ip", "-n", self.router, "link", "set", "uplink", "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, name: str) -> Host:
        host = Host(self, name, len(self.hosts) + 1)
        assert len(self.hosts) < 256 // _SLOTS - 1
        self.hosts.append(host)
        _run("ip", "route", "add", f"{host.address}/32", "via", f"{self.prefix}.{self.base}.1")
        return host

    def part(self, one: Host, other: Host) -> None:
        """Nothing passes between these two, and nobody tells them."""
        for source, target in ((one, other), (other, one)):
            _run("ip", "-n", self.router, "rule", "add", *_between(source, target), "blackhole")

    def join(self, one: Host, other: Host) -> None:
        for source, target in ((one, other), (other, one)):
            _run("ip", "-n", self.router, "rule", "del", *_between(source, target), "blackhole")

    def _remove(self) -> None:
        for host in self.hosts:
            host.die()
        for command in (("link", "del", self._uplink), ("netns", "del", self.router)):
            with contextlib.suppress(RuntimeError):
                _run("ip", *command)


def first_child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _between(source: Host, target: Host) -> tuple[str, ...]:
    return ("from", source.address, "to", target.address)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
