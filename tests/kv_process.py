"""A KVWorker in a process of its own, driven over a pipe, so that it can be stopped and killed."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from relay.geometry import Geometry
from tests.kv import DEADLINE_S, KVWorker
from workers.engine.messages import Computed
from workers.transfer.base import Destination, Handshakes, KVReceiver, KVSender, Seal, TransferEvent
from workers.transfer.manager import TransferManager
from workers.transfer.metadata import unpack


class Served(KVWorker):
    """What the process offers by name; rooms are named by number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._senders: dict[int, KVSender] = {}
        self._receivers: dict[int, KVReceiver] = {}

    def receive(self, room: int) -> int:
        self._receivers[room] = self.manager.receiver(room)
        return self._receivers[room].row

    def read(self, room: int) -> Seal | None:
        return self._receivers[room].read()

    def verify(self, room: int, pages: Sequence[int]) -> bool:
        seal = self.read(room)
        return seal is not None and self._receivers[room].verify(seal, pages)

    def release(self, room: int, quarantine: bool) -> None:
        self._receivers[room].release(quarantine)

    def proven(self, room: int) -> None:
        self.manager.proven(room)

    def send(self, room: int, pages: Sequence[int]) -> None:
        self._senders[room] = self.manager.sender(room, "key", pages)

    def bootstrap(self, room: int, to: Destination, metadata: bytes, peer: Geometry) -> None:
        self._senders[room].bootstrap(to, metadata, peer)

    def computed(self, room: int, first_layer: int, last_layer: int, first_page: int, last_page: int) -> None:
        self._senders[room].computed(Computed("key", first_layer, last_layer, first_page, last_page))

    def seal(self, room: int, seal: Seal) -> None:
        self._senders[room].seal(seal)

    def close(self, room: int) -> None:
        self._senders[room].close()

    def greet(self, metadata: bytes, peer: Geometry) -> None:
        self.manager.greet_peer(metadata, peer)

    def handshakes(self) -> Handshakes:
        return self.manager.handshakes

    def be_greeted(self) -> None:
        self.manager.be_greeted()

    def forget(self, boot: str) -> None:
        self.manager.forget_peer(boot)

    def stop(self) -> None:
        self.manager.stop()

    def checksum(self, pages: Sequence[int]) -> int:
        return self.memory.digest(pages)

    def differs(self, layer: int, page: int, content: bytes) -> bool:
        return self.pool[layer, page].tobytes() != content

    def cut_connections(self) -> int:
        """Shut every TCP connection of this process, as a broken network would; how many there were."""
        cut = 0
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family == socket.AF_INET and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
        return cut

    def read_row(self, row: int) -> Seal | None:
        assert isinstance(self.manager, TransferManager)
        return unpack(self.manager.rows.read(row))

    def refill(self, seed: int) -> None:
        """New noise in every page."""
        self.pool[...] = np.random.default_rng(seed).integers(0, 256, self.pool.shape, np.uint8)

    def block(self, layer: int, page: int) -> bytes:
        return bytes(self.pool[layer, page])


def _serve(pipe: Connection, environment: Mapping[str, str], kwargs: Mapping[str, Any]) -> None:
    os.environ.update(environment)
    served = Served(**kwargs)
    pipe.send(None)
    while True:
        name, args = pipe.recv()
        try:
            pipe.send(getattr(served, name)(*args))
        except Exception as error:
            pipe.send(error)


class KVProcess:
    """Any method of Served, called there. A stopped process answers once it is continued."""

    def __init__(self, boot: str, shape: Geometry, environment: Mapping[str, str], **kwargs: Any) -> None:
        self.boot = boot
        self._pipe, there = multiprocessing.Pipe()
        given = {"boot": boot, "shape": shape, "backend": "nixl", **kwargs}
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(there, environment, given), daemon=True)
        self._process.start()
        there.close()
        self._answer("its start")

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._pipe.send((name, args))
            return self._answer(name)

        return call

    def event(self) -> TransferEvent:
        event: TransferEvent = self.__getattr__("event")()
        return event

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _answer(self, what: str) -> Any:
        assert self._pipe.poll(2 * DEADLINE_S), f"{self.boot} did not answer {what}"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer
