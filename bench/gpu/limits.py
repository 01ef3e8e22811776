"""The memory and matrix limits of the device: what shares of a limit are taken against."""

import time
from collections.abc import Callable

import torch

from bench.gpu.results import Results, arguments

COPY = "copy"
MATRIX = "matrix product"


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median over `repeats` runs after two that do not count, each waited for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


def main() -> None:
    args = arguments(__doc__)
    device = torch.device(args.device)
    results = Results(args.out, "limits")
    on_gpu = device.type == "cuda"
    source = torch.ones(1 << (32 if on_gpu else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device, 9)
    results.add(COPY, 2 * source.nbytes / copy_s / 1e9, "GB/s read + written")
    side = 8192 if on_gpu else 256
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    results.add(MATRIX, 2 * side**3 / seconds(lambda: a @ b, device, 9) / 1e12, "TFLOP/s bf16, random data")


if __name__ == "__main__":
    main()
