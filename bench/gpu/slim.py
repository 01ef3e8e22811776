"""Take out of a folder of installed packages what is not used: python -m bench.gpu.slim DIR."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

# NIXL writes over UCX alone; what follows is loaded by name, the rest by what needs it.
NIXL_ROOTS = ("nixl_cu13/*.so", ".nixl_cu13.mesonpy.libs/*.so", "nixl_cu13.libs/ucx/*.so*")
NIXL_PLUGIN = "libplugin_UCX.so"
UCX_LEFT_OUT = ("perftest", "_gdp", "_gda", "rocm", "_ze")
# FlashInfer reads these when it names a module, and compiles from them what was not compiled ahead.
FLASHINFER_DATA = ("aot", "include", "cutlass", "cccl", "spdlog")
FLASHINFER_CODE = (".py", ".pyc", ".json", ".typed")
FLASHINFER_REQUIRES = ("nvidia_cutlass_dsl", "cudnn", "nccl")  # 0.7 GB, for kernels that nobody calls here


def nixl(site: Path) -> None:
    shutil.rmtree(site / "nixl_ep_cu13", ignore_errors=True)
    for scripts in (site / "bin", site / "include"):
        shutil.rmtree(scripts, ignore_errors=True)
    libraries = {
        file.name: file
        for folder in ("nixl_cu13", ".nixl_cu13.mesonpy.libs", "nixl_cu13.libs")
        for file in (site / folder).rglob("*.so*")
    }
    todo = [file for pattern in NIXL_ROOTS for file in site.glob(pattern)]
    todo = [file for file in todo if not any(part in file.name for part in UCX_LEFT_OUT)]
    todo += [file for file in site.rglob(NIXL_PLUGIN) if "nixl" in str(file)]
    keep: set[Path] = set()
    while todo:
        file = todo.pop()
        if file in keep:
            continue
        keep.add(file)
        todo += [libraries[name] for name in needed_by(file) if name in libraries]
    for folder in ("nixl_cu13", ".nixl_cu13.mesonpy.libs", "nixl_cu13.libs"):
        for file in (site / folder).rglob("*.so*"):
            if file not in keep:
                file.unlink()


def needed_by(library: Path) -> list[str]:
    """What the dynamic section asks for, by name."""
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def flashinfer(site: Path) -> None:
    root = site / "flashinfer"
    for entry in (root / "data").iterdir():
        if entry.is_dir() and entry.name not in (*FLASHINFER_DATA, "csrc"):
            shutil.rmtree(entry)
    for entry in (root / "data" / "csrc").iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    for file in root.rglob("*"):
        inside_data = file.relative_to(root).parts[0] == "data"
        if file.is_file() and not inside_data and file.suffix not in FLASHINFER_CODE:
            file.unlink()
    for name in FLASHINFER_REQUIRES:
        shutil.rmtree(site / name, ignore_errors=True)
        for startup in site.glob(f"{name}*.pth"):
            startup.unlink()


def main() -> None:
    site = Path(sys.argv[1])
    nixl(site)
    if (site / "flashinfer").exists():
        flashinfer(site)


if __name__ == "__main__":
    main()
