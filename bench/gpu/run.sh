#!/usr/bin/env bash
# Check and time kvrelay on a machine with one Hopper GPU, in one call that ends within eight minutes:
#     bench/gpu/run.sh [OUT]               results, logs and a table in OUT (default: $OUT, else build/gpu/out)
#     bench/gpu/run.sh --dry-run [OUT]     the same parts shortened on a CPU: shows that they run, measures nothing
# The machine needs Python 3.12 with PyTorch 2.11 for CUDA 13; no network. bench/gpu/pack.sh made build/gpu/pack.tar.xz
# before, where there was one. Each part is a process of its own: one that fails, hangs or leaves workers behind does
# not take the others along, and the table is written again after each. PARTS="limits steps" runs only those.
set -uo pipefail
cd "$(dirname "$0")/../.."

device=cuda
if [ "${1:-}" = --dry-run ]; then device=cpu; shift; fi
out=${1:-${OUT:-build/gpu/out}}
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.log "$out"/table.txt
python=${PYTHON:-python3}
deadline=$((SECONDS + 460))
parts=" ${PARTS:-machine limits steps transfer contract relay} "
statuses=()

part() { # NAME SECONDS COMMAND...: its output goes to OUT/NAME.log
    local name=$1 limit=$2 status left=$((deadline - SECONDS)) start=$SECONDS
    shift 2
    if [[ $parts != *" $name "* ]]; then return; fi
    if [ "$limit" -gt "$left" ]; then limit=$left; fi
    if [ "$limit" -le 0 ]; then
        status="no time left"
    else
        "$python" -m bench.gpu.limited "$limit" "$@" >"$out/$name.log" 2>&1
        case $? in 0) status=ok ;; 124) status="ended after $limit s" ;; *) status=failed ;; esac
    fi
    echo "$name: $((SECONDS - start)) s, $status"
    if [ "$status" != ok ] && [ -e "$out/$name.log" ]; then tail -n 5 "$out/$name.log" | sed 's/^/    /'; fi
    statuses+=("$name: $status")
    { "$python" -m bench.gpu.results "$out"; printf '%s\n' "${statuses[@]}"; } >"$out/table.txt" 2>&1
}

unpack() {
    work=$(mktemp -d "${TMPDIR:-/tmp}/kvrelay-gpu.XXXXXX") # not local: the trap outlives this function
    trap 'rm -rf "$work"' EXIT
    tar -C "$work" -xJf build/gpu/pack.tar.xz || exit 1
    export PYTHONPATH="$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}"
    export FLASHINFER_WORKSPACE_BASE=$work
    # Where modules were compiled ahead no time goes into others: who needs one fails, and a test is skipped.
    if [ -d "$work/site/flashinfer/data/aot/norm" ]; then export FLASHINFER_DISABLE_JIT=1; fi
}

export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [ $device = cuda ]; then
    unpack
    part machine 20 bash -c "nvidia-smi; $python -V; $python -c 'import torch, flashinfer, nixl_cu13, celery
print(torch.__version__, flashinfer.__version__)'"
fi
part limits 25 "$python" -m bench.gpu.limits --device $device --out "$out"
part steps 90 "$python" -m bench.gpu.steps --device $device --out "$out"
part transfer 50 "$python" -m bench.gpu.transfer --device $device --out "$out"
part contract 100 "$python" -m pytest -q --timeout=60 --continue-on-collection-errors tests/gpu
part relay 300 "$python" -m bench.gpu.relay --device $device --out "$out"
tail -qn 1 "$out/contract.log" 2>/dev/null | sed 's/^/contract: /' >>"$out/table.txt"
cat "$out/table.txt"
[[ ! ${statuses[*]} =~ (failed|ended|no\ time) ]]
