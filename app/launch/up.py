"""`kvrelay up`: everything on this machine, from one command, until Ctrl-C."""

import fcntl
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from redis import Redis
from redis.exceptions import RedisError

from app.gateway.keys import KeyRing
from app.launch import programs
from app.launch.address import base_url
from app.launch.checks import CheckFailed, check_folder, check_port, check_redis, parse_cores, share_cores
from app.launch.display import Display
from app.launch.gpus import gpu_env, visible_gpus
from app.launch.sample import QUESTION, SampleFailed, ask
from app.launch.supervisor import POLL_S, Program, StartFailed, Supervisor, old_log
from app.tracing.tracing import can_trace
from relay.model_card import read_model_card
from relay.protocol import ProtocolMismatch, check_protocol
from relay.rooms import root_key
from relay.routing import ROLES
from relay.settings import Settings, variable

_PHASES = {"loading": "loading the model", "loaded": "warm", "ready": "ready"}
_FLOWER_HEARS_S = 5.0  # a worker sends a heartbeat every 2 s
_SETTLE_S = 10.0  # beyond its grace period, for a worker to hand back and say goodbye


class _Stopped(Exception):
    """Somebody asked to stop while things were starting."""


class Launcher:
    """Starts the processes in order, shows how it goes, and then keeps them running."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._var = Path(settings.var_dir)
        self._display = Display()
        self._supervisor = Supervisor()
        self._stop_requests = 0
        self._gateway_url = base_url(settings.host, settings.port)
        self._flower_url = base_url(settings.host, settings.flower_port)

    def run(self) -> int:
        """Serve until a signal. The exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            lock = self._check()
        except (CheckFailed, PermissionError, ValueError) as error:
            self._display.line(f"kvrelay: {error}")
            return os.EX_CONFIG
        status = 0
        try:
            self._start()
            self._introduce()
            while not self._stop_requests:
                self._supervisor.tick()
                time.sleep(POLL_S)
        except (StartFailed, ProtocolMismatch) as error:
            self._display.line(f"kvrelay: {error}")
            status = 1 if isinstance(error, StartFailed) else os.EX_CONFIG
        except _Stopped:
            pass
        finally:
            self._stop()
            lock.close()
        return status

    def _on_signal(self, *_: Any) -> None:
        self._stop_requests += 1

    def _check(self) -> IO[str]:
        """All that can be known to be wrong before anything starts. The lock on the folder, to be kept."""
        settings = self._settings
        if not (settings.unified_workers or (settings.prefill_workers and settings.decode_workers)):
            raise CheckFailed(
                "These workers cannot serve: set PREFILL_WORKERS and DECODE_WORKERS, or UNIFIED_WORKERS."
            )
        read_model_card(settings.model_path)
        KeyRing.from_settings(settings)
        can_trace(os.environ)
        check_folder(self._var)
        check_folder(self._var / "log")
        lock = (self._var / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckFailed(
                f"Another kvrelay runs in {self._var.absolute()}: stop it, or set VAR_DIR to another folder."
            ) from None
        check_port(settings.host, settings.port, "PORT")
        check_port(settings.host, settings.flower_port, "FLOWER_PORT")
        programs.flower_env(settings.host)
        parse_cores(settings.cores)
        if not self._own_redis:
            check_redis(settings.redis_url)
        return lock

    @property
    def _own_redis(self) -> bool:
        return not variable("REDIS_URL", os.environ)

    # ---- starting

    def _start(self) -> None:
        settings = self._settings
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "REDIS_URL": settings.redis_url}
        if self._own_redis:
            env["REDIS_URL"] = self._start_valkey(env)
            # Nobody else can join. A network device that goes away would stall what UCX sends through it.
            env.setdefault("UCX_NET_DEVICES", "lo")
        check_protocol(env["REDIS_URL"], root_key(settings.model_name))
        workers = self._start_workers(env)
        self._run("gateway", programs.gateway_command(), env, grace_s=settings.grace_s + _SETTLE_S)
        for i in range(1, settings.batch_processors + 1):
            self._run(f"batches-{i}", programs.batches_command(), env | self._metrics_env(workers + i - 1))
        while missing := self._missing():
            self._wait(f"starting: {self._progress()}; waiting for {', '.join(missing)}")
        # Flower asks the workers once about themselves, so it starts after them.
        flower = programs.flower_command(settings)
        self._run("flower", flower, env | programs.flower_env(settings.host))
        while not _fetch(f"{self._flower_url}/healthcheck"):
            self._wait("starting Flower")
        # It shows a task whole only when it has heard from the worker before.
        deadline = time.monotonic() + _FLOWER_HEARS_S
        while self._heard_in_flower() < workers and time.monotonic() < deadline:
            self._wait("starting Flower")

    def _start_valkey(self, env: dict[str, str]) -> str:
        """Start the embedded server and wait until it has read its data. Its URL."""
        folder = self._var / "valkey"
        check_folder(folder)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self._run("valkey", programs.valkey_command(port, folder.absolute()), env, needed=True)
        url = f"redis://127.0.0.1:{port}/0"
        with Redis.from_url(url) as client:
            while True:
                try:
                    client.ping()
                    return url
                except RedisError:
                    self._wait("starting Valkey")

    def _start_workers(self, env: dict[str, str]) -> int:
        """How many it started."""
        settings = self._settings
        counts = zip(ROLES, (settings.prefill_workers, settings.decode_workers, settings.unified_workers))
        workers = [(role, i) for role, count in counts for i in range(1, count + 1)]
        cores = parse_cores(settings.cores)
        gpus = () if settings.device == "cpu" else visible_gpus(os.environ)
        for n, ((role, i), share) in enumerate(zip(workers, share_cores(cores, len(workers)))):
            threads = len(share) if share else max(1, len(cores or os.sched_getaffinity(0)) // len(workers))
            self._run(
                f"{role}-{i}",
                programs.worker_command(role, settings.model_name, f"{role}-{i}"),
                {"THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
                | env
                | programs.worker_env(role)
                | gpu_env(gpus, n, len(workers), settings.gpu_memory_fraction)
                | self._metrics_env(n),
                cores=share,
                grace_s=settings.grace_s + _SETTLE_S,
            )
        return len(workers)

    def _metrics_env(self, n: int) -> dict[str, str]:
        """The n-th process that answers Prometheus has the n-th port from METRICS_PORT on."""
        port = self._settings.metrics_port
        return {"METRICS_PORT": str(port + n)} if port else {}

    def _heard_in_flower(self) -> int:
        """How many workers Flower has had a heartbeat from."""
        return (_fetch(f"{self._flower_url}/metrics") or "").count("\nflower_worker_online{")

    def _run(self, name: str, command: list[str], env: dict[str, str], **how: Any) -> None:
        log_path = self._var / "log" / f"{name}.log"
        if log_path.exists():
            log_path.replace(old_log(log_path))
        self._supervisor.start(Program(name, command, env, log_path, **how))

    def _wait(self, text: str) -> None:
        """One turn of a loop that waits for something to start. Raises StartFailed or _Stopped."""
        self._supervisor.check()
        if self._stop_requests:
            raise _Stopped
        self._display.step(text)
        time.sleep(POLL_S)

    def _missing(self) -> list[str]:
        """What is not there yet of all that serving a request needs."""
        answer = _fetch(f"{self._gateway_url}/ready")
        return ["gateway"] if answer is None else list(json.loads(answer)["missing"])

    def _progress(self) -> str:
        phases = []
        for child in self._supervisor.children:
            role, _, number = child.program.name.partition("-")
            if number and role in ROLES:
                phases.append(f"{child.program.name} {_phase(child.program.log_path)}")
        return ", ".join(phases)

    # ---- serving and stopping

    def _introduce(self) -> None:
        """Ask one question, show the answer and how to go on."""
        say = self._display.line
        self._display.step("asking a first question")
        try:
            sample = ask(self._gateway_url, self._settings.api_key or self._settings.admin_key, self._turn)
        except SampleFailed as error:
            say(f"kvrelay is ready, but the first question failed: {error}")
        else:
            say(f"{self._settings.model_name} is ready.")
            say()
            say(f"  question  {QUESTION}")
            say(f"  answer    {sample.answer}")
            for leg, time_spent in sample.timings.items():
                say(f"  {leg:8}{time_spent}")
        say()
        say(f"  API       {self._gateway_url}/v1   (OpenAI clients: base_url)")
        say(f"  console   {self._gateway_url}/console")
        say(f"  Flower    {self._flower_url}")
        say(f"  logs      {self._var / 'log'}/")
        say()
        say("Try:")
        say(f"  curl -N {self._gateway_url}/v1/chat/completions -H 'Content-Type: application/json' \\")
        if self._settings.api_key or self._settings.api_keys_file:
            say("""    -H "Authorization: Bearer $API_KEY" \\""")
        say("""    -d '{"messages": [{"role": "user", "content": "Tell me a joke."}], "stream": true}'""")
        say()
        say("Ctrl-C stops everything.")

    def _turn(self) -> None:
        """What goes on while the answer is awaited. Raises _Stopped."""
        if self._stop_requests:
            raise _Stopped
        self._supervisor.tick()

    def _stop(self) -> None:
        asked = self._stop_requests
        if self._supervisor.children:
            self._display.step("stopping: finishing what runs; Ctrl-C again stops at once")
        self._supervisor.stop(hurried=lambda: self._stop_requests > asked)
        self._display.line("Stopped.")


def _phase(log_path: Path) -> str:
    """How far a worker has come, by the last event of its log that says so."""
    words = log_path.read_text(errors="replace").split() if log_path.exists() else []
    events = [word for word in words if word in _PHASES]
    return _PHASES[events[-1]] if events else "starting"


def _fetch(url: str) -> str | None:
    """The body of an answer, whatever its status; None when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except (OSError, HTTPException):
        return None
