"""Where on this machine the peers are."""

from pathlib import Path
from typing import NamedTuple


class Places(NamedTuple):
    """Virtual environments of the peers; the model as a Hugging Face folder, and as GGUF for llama.cpp."""

    model: Path | None
    gguf: Path | None
    vllm: Path | None
    llama: Path | None
    transformers: Path | None


def absent(place: str, path: Path | None, inside: str = "") -> str | None:
    """Why the place cannot be used; None when `inside` of it is there."""
    options = f"--{place} or PEER_{place.upper()}"
    if path is None:
        return f"nobody said where its {place} is: name it with {options}"
    if not (path / inside).exists():
        return f"{path / inside} does not exist: name another place with {options}"
    return None
