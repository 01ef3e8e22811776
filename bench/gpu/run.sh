#!/usr/bin/env bash
# Check and time kvrelay on a machine with one Hopper GPU, in one call that ends within eight minutes:
#     bench/gpu/run.sh [OUT]               results, logs and a table in OUT (default: $OUT, else build/gpu/out)
#     bench/gpu/run.sh --dry-run [OUT]     the same steps shortened on a CPU: shows that they run, measures nothing
# The machine needs Python 3.12 with PyTorch 2.11 for CUDA 13, and a C++ compiler; no network. bench/gpu/pack.sh made
# build/gpu/pack.tar.xz before, where there was one. A step that fails or takes too long does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/../.."

device=cuda
if [ "${1:-}" = --dry-run ]; then device=cpu; shift; fi
out=${1:-${OUT:-build/gpu/out}}
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.log
python=${PYTHON:-python3}
deadline=$((SECONDS + 465))
failed=()

step() { # NAME SECONDS COMMAND...: its output goes to OUT/NAME.log
    local name=$1 limit=$2 status left=$((deadline - SECONDS)) start=$SECONDS
    shift 2
    if [ "$limit" -gt "$left" ]; then limit=$left; fi
    if [ "$limit" -le 0 ]; then echo "$name: no time left"; failed+=("$name"); return 1; fi
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    echo "$name: $((SECONDS - start)) s, $([ $status -eq 0 ] && echo ok || echo "failed ($status)")"
    [ $status -eq 0 ] || { failed+=("$name"); tail -n 5 "$out/$name.log" | sed 's/^/    /'; }
    return $status
}

unpack() {
    local work
    work=$(mktemp -d /tmp/kvrelay-gpu.XXXXXX)
    trap 'rm -rf "$work"' EXIT
    tar -C "$work" -xJf build/gpu/pack.tar.xz || exit 1
    export PYTHONPATH="$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}"
    export FLASHINFER_WORKSPACE_BASE=$work
    site=$work/site
}

# The C++ kernels are only for the tests of the contract, which cover a CPU too.
build() {
    "$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site/built" . &&
        cp "$site"/built/kernels/_native*.so kernels/
}

export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [ $device = cuda ]; then
    unpack
    step machine 20 bash -c "nvidia-smi; $python -V; $python -c 'import torch, flashinfer, nixl_cu13, celery
print(torch.__version__, flashinfer.__version__)'"
    export -f build
    export python site
    step build 60 bash -c build
fi
step limits 25 "$python" -m bench.gpu.limits --device $device --out "$out"
step contract 100 "$python" -m pytest -q --timeout=60 tests/gpu
step relay 130 "$python" -m bench.gpu.relay --device $device --out "$out"
step steps 90 "$python" -m bench.gpu.steps --device $device --out "$out"
step transfer 50 "$python" -m bench.gpu.transfer --device $device --out "$out"
"$python" -m bench.gpu.results "$out" | tee "$out/table.txt"
tail -n 1 "$out/contract.log" 2>/dev/null | tee -a "$out/table.txt"
if [ ${#failed[@]} -gt 0 ]; then echo "failed: ${failed[*]}" | tee -a "$out/table.txt"; exit 1; fi
