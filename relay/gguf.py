"""The head of a GGUF file: its metadata and where its tensors lie, without numpy or torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from relay.model_file import ModelError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


class GGUFTensor(NamedTuple):
    """`shape` is in row-major order, the reverse of the file's; `kind` is the ggml type number."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFHead(NamedTuple):
    """Metadata by key, tensors by name; tensor offsets count from the start of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an architecture's own key: `get("block_count")` reads `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf_head(path: Path) -> GGUFHead:
    """Read the head of the GGUF file at `path`. Raises ModelError if it is not GGUF or is cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).head()
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({error}): download it again") from error


class _Reader:
    """A cursor over the bytes of the file. Reading past the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def head(self) -> GGUFHead:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self.at = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        tensor_count, key_count = self.scalar("<Q"), self.scalar("<Q")
        metadata = {}
        for _ in range(key_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        tensors = [(self.string(), self.tensor()) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self.at // alignment) * alignment
        return GGUFHead(
            metadata, {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors}
        )

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) < length:
            raise struct.error("a string goes past the end of the file")
        self.at += length
        return raw.decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, length = self.scalar("<I"), self.scalar("<Q")
            if item_kind in _SCALARS:
                return self.numbers(_SCALARS[item_kind], length)
            return [self.value(item_kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def numbers(self, form: str, length: int) -> list[Any]:
        if length * struct.calcsize(form) > len(self.data) - self.at:
            raise struct.error("an array goes past the end of the file")
        packed = f"<{length}{form[1]}"
        values = struct.unpack_from(packed, self.data, self.at)
        self.at += struct.calcsize(packed)
        return list(values)

    def tensor(self) -> GGUFTensor:
        dims = [self.scalar("<Q") for _ in range(self.scalar("<I"))]
        return GGUFTensor(shape=tuple(reversed(dims)), kind=self.scalar("<I"), offset=self.scalar("<Q"))
