"""Compile the FlashInfer modules that the GPU run needs, for Hopper, on a machine without a GPU.

    FLASHINFER_CUDA_ARCH_LIST=9.0a python -m bench.gpu.modules TARGET

nvcc 13 is needed, and a `LIBRARY_PATH` with libcudart.so and any libcuda.so to link against. Each module ends
in TARGET/<name>/<name>.so, as FlashInfer looks for it under `flashinfer/data/aot`; what is there is kept.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HEAD_DIMS = (64, 128)  # SmolLM2 and the model shaped like Llama 3 8B
DTYPE = torch.bfloat16
HOPPER = (9, "0a")
JOB_BYTES = 4 << 30  # what the compiler of a larger source takes


def jobs(cores: int, memory_bytes: int) -> int:
    """How many compilers run at a time; ninja by itself starts more than one for each core."""
    return max(1, min(cores, memory_bytes // JOB_BYTES))


def specs() -> Iterator[Any]:
    """What `FlashInferKernels` loads for bfloat16."""
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.attention import modules as attention
    from flashinfer.jit.core import current_compilation_context
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module
    from flashinfer.jit.sampling import gen_sampling_module

    yield from (gen_norm_module(), gen_page_module(), gen_rope_module(), gen_act_and_mul_module("silu"))
    yield gen_sampling_module()
    for head_dim in HEAD_DIMS:
        shape = (DTYPE, DTYPE, DTYPE, torch.int32, head_dim, head_dim, 0, False, False)
        yield attention.gen_batch_decode_module(*shape)
        yield attention._gen_batch_prefill_primary_module("fa2", *shape, False)
    if HOPPER in current_compilation_context.TARGET_CUDA_ARCHS:
        shape = (DTYPE, DTYPE, DTYPE, torch.int32, 128, 128, 0, False, False)
        yield attention.gen_batch_prefill_module("fa3", *shape, False)
    for variant in ((True, False), (False, True)):  # a sliding window, a logit soft cap
        shape = (DTYPE, DTYPE, DTYPE, torch.int32, HEAD_DIMS[0], HEAD_DIMS[0], 0, *variant)
        yield attention.gen_batch_decode_module(*shape)
        yield attention._gen_batch_prefill_primary_module("fa2", *shape, False)
    # Mistral 7B has a window, and four query heads for each key: its decodes take the prefill kernels too.
    shape = (DTYPE, DTYPE, DTYPE, torch.int32, 128, 128, 0, True, False)
    yield attention._gen_batch_prefill_primary_module("fa2", *shape, False)


def main() -> None:
    target = Path(sys.argv[1])
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.environ.setdefault("MAX_JOBS", str(jobs(len(os.sched_getaffinity(0)), memory_bytes)))
    for spec in specs():
        library = target / spec.name / f"{spec.name}.so"
        if library.exists():
            continue
        started = time.monotonic()
        spec.build()
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, library)
        print(f"{spec.name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
