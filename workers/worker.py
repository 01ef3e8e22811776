"""One worker process: builds the engine and its threads, wires them by queues, starts and joins them."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from kernels import load_kernels
from relay import celery
from relay.exposition import metrics_address, process_registry, serve
from relay.geometry import Geometry
from relay.grammar import Grammars
from relay.life_lock import LifeLock
from relay.log import event
from relay.mailbox import Mailbox
from relay.model_file import fingerprint, resolve_model
from relay.protocol import ProtocolMismatch, check_protocol
from relay.redis_client import AWAY
from relay.rooms import Rooms, root_key
from relay.routing import ROLES
from relay.settings import Settings
from relay.tokenizer import Tokenizer
from relay.worker_card import Incarnation, Load, WorkerCard, new_boot
from workers.control import Abort, Control, Order
from workers.cores import usable_cores
from workers.decode import DecodeLegs, UnifiedLegs
from workers.device import choose_device
from workers.doorbell import Doorbell, TaskHandle
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.kv_pool import KVPool
from workers.engine.messages import Admitted, Computed, Event, Flush, Stop
from workers.engine.sampler import Sampler
from workers.legs import Desk, Legs
from workers.mail_thread import MailThread
from workers.memory_share import pool_bytes
from workers.meters import Meters, WorkerState
from workers.models import Model, load_model
from workers.output import OutputThread
from workers.prefill import PrefillLegs
from workers.ringer import Ringer
from workers.senders import Senders
from workers.transfer.backend import kv_manager
from workers.transfer.base import KVManager, SendFailed, Sent, TransferEvent
from workers.transfer.memory import KVMemory
from workers.warm_up import warm_up

log = logging.getLogger(__name__)

RDMA_DEVICES = Path("/sys/class/infiniband")
JOIN_S = 5.0
OUTPUT_S = 1.0  # a drain that went well has emitted everything
REGISTER_RETRY_S = 0.25
GROUP_BYTES = 4 << 20  # some 0.5 ms of a core to write, as much as each write costs beside
SCORED_BYTES = {"cpu": 6 << 20, "cuda": 256 << 20}  # of float32 logits that a step keeps to score a prompt


class Worker:
    """Implements `pool.EngineHost` for the role in the environment."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings.from_env()
        assert self._settings.role in ROLES

    # ---- pool.EngineHost

    def start(self, name: str) -> None:
        """Load the model, warm it up, start the threads, register. Raises ModelError, SettingsError,
        ProtocolMismatch or UnsupportedServer."""
        settings = self._settings
        check_protocol(settings.redis_url, root_key(settings.model_name))
        self._name = name
        self._boot = new_boot(settings.role)
        started = time.monotonic()
        event(log, "loading", model=settings.model_path, role=settings.role, dtype=settings.dtype)
        torch.set_num_threads(settings.threads or usable_cores())
        device = choose_device(settings.device)
        kernels = load_kernels(settings.kernels, device.type)
        model = load_model(settings.model_path, settings.dtype, device, kernels, settings.weights)
        tokenizer = Tokenizer.load(settings.model_path)
        grammars = Grammars(tokenizer, model.config.vocab_size)
        grammars.warm_up()
        max_rows = 1 if settings.role == "prefill" else settings.max_running
        self._geometry = _geometry(settings, model, max_rows)
        shape = model.config.kv_shape(self._geometry.pages, settings.page_size)
        kv = KVPool.allocate(shape, model.dtype, model.device)
        self._lock = self._life_lock(kv)
        self._incarnation = Incarnation.here(self._boot, self._lock.path if self._lock else "")
        warm_up(model, kv, settings.chunk_tokens, max_rows)
        event(log, "loaded", seconds=time.monotonic() - started, kv_pages=kv.pages)

        self._rooms = self.make_rooms()
        self._mail = MailThread(self.make_mailbox(self._boot), self._to_control, self._crash)
        self._ringer = Ringer(self._ring_bell)
        self._manager = self.make_manager(self._boot, _memory(self._geometry, kv))
        self._senders = Senders(self._manager, self._geometry.layers, self._geometry.page_size)
        registry = process_registry(settings.model_name, settings.role, worker=name)
        self._meters = Meters(settings, registry)
        self._output = OutputThread(self._rooms, tokenizer, self._to_control, self._meters)
        context_tokens = settings.context_tokens or model.config.context_length_tokens
        self._engine = Engine(
            model,
            kv,
            Sampler(model.config.vocab_size, tokenizer.eos_ids, model.device, grammars, kernels),
            EngineConfig(
                context_tokens,
                settings.chunk_tokens,
                settings.group_layers,
                GROUP_BYTES,
                settings.reserve_tokens,
                scored_tokens=max(1, SCORED_BYTES[device.type] // (4 * model.config.vocab_size)),
            ),
            eos_ids=tokenizer.eos_ids,
            salt=self._geometry.fingerprint.encode(),
            on_event=self._on_event,
            on_produced=self._output.put,
            on_computed=self._on_computed,
        )
        self._control = Control(
            self._boot,
            settings,
            self._rooms,
            self._engine,
            self._manager,
            self._legs,
            self._card,
            self._ringer.ring,
            self._crash,
            self._restart,
        )
        registry.register(self._state())
        serve(registry, settings)
        self._register()
        self._manager.start(self._on_transfer)
        self._output.start()
        self._engine.start()
        self._control.start()
        self._mail.start()
        event(
            log, "ready", worker=name, boot=self._boot, role=settings.role, seconds=time.monotonic() - started
        )

    def ring(self, bell: Doorbell) -> None:
        self._meters.rang(bell)
        self._control.put(bell)

    def abort(self, task: TaskHandle) -> None:
        self._control.put(Abort(task))

    def capacity(self) -> int:
        return max(1, self._control.active + self._control.spare)

    def stats(self) -> dict[str, Any]:
        engine = self._engine.headroom._asdict() | self._engine.stats._asdict()
        rounded = {name: round(value, 3) for name, value in engine.items()}
        return {"boot": self._boot, "role": self._settings.role} | rounded

    def flush_cache(self) -> int:
        self._engine.submit(Flush())
        return self._engine.headroom.cached_pages

    def drain(self) -> None:
        self._control.put(Order.DRAIN)

    def hand_back(self) -> None:
        self._control.put(Order.HAND_BACK)

    def idle(self) -> bool:
        return self._control.idle

    def stop(self) -> None:
        """Whatever is still owned is given back by the last call; its lease need not expire."""
        self._control.put(Order.STOP)
        self._control.join(JOIN_S)
        self._output.stop(OUTPUT_S)
        self._engine.submit(Stop())
        self._engine.join(JOIN_S)
        self._manager.stop()
        self._mail.stop(JOIN_S)
        try:
            for ring in self._rooms.deregister(self._boot):
                self._ringer.ring(ring)
        except (*AWAY, ProtocolMismatch) as error:
            event(log, "deregister_failed", logging.WARNING, error=error)
        self._ringer.stop(JOIN_S)
        self._rooms.close()
        event(log, "stopped", boot=self._boot)

    # ---- what reaches beyond this process

    def make_rooms(self) -> Rooms:
        return Rooms(self._settings.redis_url, self._settings.model_name)

    def make_mailbox(self, boot: str) -> Mailbox:
        return Mailbox(self._settings.redis_url, self._settings.model_name, boot)

    def make_manager(self, boot: str, memory: KVMemory) -> KVManager:
        settings = self._settings
        return kv_manager(
            "nixl",
            boot,
            memory,
            rows=settings.max_running,
            post_bytes=settings.post_bytes,
            digest=settings.kv_digest,
        )

    # ---- how the threads reach each other

    def _legs(self, desk: Desk) -> Legs:
        match self._settings.role:
            case "prefill":
                return PrefillLegs(desk, self._senders)
            case "decode":
                return DecodeLegs(desk, self._output, self._meters)
            case _:
                return UnifiedLegs(desk, self._output, self._meters)

    def _to_control(self, message: Any) -> None:
        self._control.put(message)

    def _on_event(self, message: Event) -> None:
        """On the engine thread."""
        if isinstance(message, Admitted) and self._settings.role == "prefill":
            self._senders.admitted(message)
        self._control.put(message)

    def _on_transfer(self, message: TransferEvent) -> None:
        """On the transfer thread."""
        if isinstance(message, Sent):
            self._meters.sent(message)
        elif isinstance(message, SendFailed):
            self._meters.send_failed()
        self._control.put(message)

    def _on_computed(self, part: Computed) -> None:
        """On the engine thread, inside the forward pass."""
        self._senders.computed(part)

    def _ring_bell(self, bell: Any) -> None:
        celery.ring(bell)

    # ---- registration and ends

    def _life_lock(self, kv: KVPool) -> LifeLock | None:
        """It speaks for threads alone: what a GPU or a network card has begun might end later than they."""
        by_threads = not kv.tensor.is_cuda and not any(RDMA_DEVICES.glob("*"))
        folder = self._settings.lives_dir
        return LifeLock(folder, self._boot) if folder and by_threads else None

    def _card(self, load: Load) -> WorkerCard:
        return WorkerCard(
            incarnation=self._incarnation,
            name=self._name,
            role=self._settings.role,
            geometry=self._geometry,
            capacity_tokens=self._engine.headroom.capacity_tokens,
            agent_metadata=self._manager.agent_metadata,
            load=load,
            metrics=metrics_address(self._settings),
        )

    def _state(self) -> WorkerState:
        return WorkerState(
            self._control.load,
            lambda: self._engine.stats,
            lambda: self._control.unproven,
            lambda: self._manager.handshakes,
            lambda: self._control.peer_restarts,
            self._geometry.page_size,
            self._geometry.pages,
        )

    def _register(self) -> None:
        """Wait for Redis as long as it takes: a worker may start before it."""
        while True:
            try:
                self._rooms.register(self._card(self._control.load()))
                return
            except AWAY as error:
                event(log, "redis_away", logging.WARNING, error=error)
                time.sleep(REGISTER_RETRY_S)

    def _crash(self, error: BaseException) -> None:
        """A thread is gone and what it owned is in an unknown state: the process goes too, and the leases
        bring its legs to another worker."""
        log.critical("worker_crashed", exc_info=error)
        os._exit(70)

    def _restart(self) -> None:
        """Too much of the pool waits for proof: drain and end; the supervisor starts the next incarnation."""
        event(log, "quarantine_full", logging.ERROR, boot=self._boot)
        os.kill(os.getpid(), signal.SIGTERM)


def _geometry(settings: Settings, model: Model, max_rows: int) -> Geometry:
    config = model.config
    geometry = Geometry(
        fingerprint=fingerprint(resolve_model(settings.model_path)),
        dtype=settings.dtype,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_size=settings.page_size,
        pages=0,
    )
    if settings.kv_pool_tokens:
        return geometry._replace(pages=-(-settings.kv_pool_tokens // settings.page_size))
    size_bytes = pool_bytes(settings, model, max_rows)
    return geometry._replace(pages=max(1, size_bytes // geometry.page_bytes))


def _memory(geometry: Geometry, kv: KVPool) -> KVMemory:
    if kv.tensor.is_cuda:
        return KVMemory(geometry, kv.address, "VRAM", kv.tensor.device.index)
    return KVMemory(geometry, kv.address)
