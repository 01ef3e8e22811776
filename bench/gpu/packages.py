"""Print, as pip requirements, what the GPU machine lacks: kvrelay's dependencies as they are installed here,
FlashInfer, and what tests and benchmarks use. `HAS` is what such a machine brings with PyTorch."""

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
HAS = {
    *("torch", "numpy", "safetensors", "huggingface-hub"),
    *("setuptools", "pip", "pytest", "packaging", "pyyaml", "tqdm", "requests"),
}
ALSO = ("httpx", "psutil", "pytest-timeout")
# With what it imports at once; nothing of it needs to be installed here.
FLASHINFER = (
    *("flashinfer-python==0.7.4", "apache-tvm-ffi==0.1.15.post2"),
    *("einops==0.8.2", "nvidia-ml-py==13.615.71", "tabulate==0.10.0"),
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: list[str]) -> dict[str, str]:
    """Installed versions of these distributions and of all that they require. Raises PackageNotFoundError."""
    found: dict[str, str] = {}
    while names:
        requirement = Requirement(names.pop())
        name = canonical(requirement.name)
        if name in found or name in HAS:
            continue
        found[name] = version(name)
        for text in requires(name) or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                names.append(text.split(";")[0])
    return found


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]  # newer than what an editable install remembers
    for name, installed in sorted(closure([*project["dependencies"], *ALSO]).items()):
        print(f"{name}=={installed}")
    print("\n".join(FLASHINFER))


if __name__ == "__main__":
    main()
