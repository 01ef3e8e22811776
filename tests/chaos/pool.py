"""A worker that faults happen to: CELERY_CUSTOM_WORKER_POOL=tests.chaos.pool:FaultyPool."""

import os
from pathlib import Path
from typing import Any

from relay.mailbox import Mailbox
from relay.rooms import Rooms
from tests.chaos.injector import FaultyMailbox, FaultyRooms, FaultyTransport, Injector, ring_transition
from workers.engine.messages import Admitted, Computed, Event, Prefilled, Reserved
from workers.pool import EngineHost, EnginePool
from workers.transfer.base import KVManager
from workers.transfer.manager import TransferManager
from workers.transfer.memory import KVMemory
from workers.transfer.nixl import NixlTransport
from workers.transfer.rows import Rows
from workers.worker import Worker

NAMED_EVENTS = (Admitted, Prefilled, Reserved)


class FaultyPool(EnginePool):
    def make_host(self) -> EngineHost:
        return FaultyWorker()


class FaultyWorker(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._injector = Injector(Path(os.environ["FAULTS"]), self._settings.role)

    def make_rooms(self) -> Rooms:
        return FaultyRooms(self._settings.redis_url, self._settings.model_name, self._injector)

    def make_mailbox(self, boot: str) -> Mailbox:
        return FaultyMailbox(self._settings.redis_url, self._settings.model_name, boot, self._injector)

    def make_manager(self, boot: str, memory: KVMemory) -> KVManager:
        settings = self._settings
        rows, source_rows = Rows(settings.max_running), Rows(settings.max_running)
        transport = FaultyTransport(NixlTransport(boot, memory, rows, source_rows), self._injector)
        return TransferManager(
            boot, memory, rows, source_rows, transport, settings.post_bytes, settings.kv_digest
        )

    def _ring_bell(self, bell: Any) -> None:
        for _ in range(self._injector.copies(ring_transition(bell.leg))):
            super()._ring_bell(bell)

    def _on_event(self, message: Event) -> None:
        if isinstance(message, NAMED_EVENTS):
            name = type(message).__name__.lower()
            self._injector.around(name, lambda: super(FaultyWorker, self)._on_event(message))
        else:
            super()._on_event(message)

    def _on_computed(self, part: Computed) -> None:
        self._injector.around("computed", lambda: super(FaultyWorker, self)._on_computed(part))
