#!/usr/bin/env bash
# Gather what bench/gpu/run.sh needs on a machine without a network into one file:
#     bench/gpu/pack.sh [--no-modules]     -> build/gpu/pack.tar.xz
# Needs a package index, xz and binutils, and nvcc 13 for FlashInfer's modules, half an hour of two cores, once: they
# are kept in build/gpu/modules. With --no-modules none is compiled, and the GPU machine's own nvcc compiles them all,
# which takes minutes of its time.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-.venv/bin/python}
build=build/gpu
site=$build/site
limit_mb=60

pip_for_312() {
    local platforms=()
    for glibc in 17 24 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
    "$python" -m pip --disable-pip-version-check install -qq --no-deps --no-compile --only-binary=:all: \
        --python-version 3.12 --implementation cp "${platforms[@]}" \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 "$@"
}

compile_modules() { # FlashInfer's own compiler driver, in a virtual environment of its own
    local cuda=$build/cuda venv=$build/venv here
    mkdir -p "$cuda/lib" "$cuda/include"
    here=$(realpath "$cuda")
    pip_for_312 --target "$cuda/site" --upgrade nvidia-cuda-runtime==13.0.96 nvidia-curand==10.4.5.25
    ln -sf "$here"/site/nvidia/cu13/lib/libcudart.so.13 "$cuda/lib/libcudart.so"
    gcc -shared -x c /dev/null -o "$cuda/lib/libcuda.so" -Wl,-soname,libcuda.so.1
    # Included by headers that use nothing of them.
    touch "$cuda"/include/{cublasLt,cublas_v2}.h
    [ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv"
    "$python" -c 'import site; print(site.getsitepackages()[0])' >"$("$venv/bin/python" -c \
        'import site; print(site.getsitepackages()[0])')/kvrelay.pth"
    "$venv/bin/python" -m pip --disable-pip-version-check install -qq --no-deps \
        $("$python" -m bench.gpu.packages | grep -E '^(flashinfer|apache-tvm|einops|nvidia-ml|tabulate)') \
        ninja click requests tqdm packaging filelock
    CPATH=$here/include:$here/site/nvidia/cu13/include LIBRARY_PATH=$here/lib FLASHINFER_CUDA_ARCH_LIST=9.0a \
        FLASHINFER_WORKSPACE_BASE=$(realpath "$build") \
        "$venv/bin/python" -m bench.gpu.modules "$modules"
}

rm -rf "$site"
mkdir -p "$site"
"$python" -m bench.gpu.packages >"$build/packages.txt"
modules=$build/modules/$(sed -n 's/^flashinfer-python==//p' "$build/packages.txt")
mkdir -p "$modules"
pip_for_312 --target "$site" -r "$build/packages.txt"
"$python" -m bench.gpu.slim "$site"
# What an installation says of kvrelay itself, which runs from its tree there.
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
mkdir "$site/kvrelay-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: kvrelay\nVersion: %s\n' "$version" >"$site/kvrelay-$version.dist-info/METADATA"
if [ "${1:-}" != --no-modules ]; then compile_modules; fi
mkdir -p "$site/flashinfer/data/aot"
cp -r "$modules/." "$site/flashinfer/data/aot"
XZ_OPT="-6 -T0" tar -C "$build" -cJf "$build/pack.tar.xz" site
bytes=$(stat -c %s "$build/pack.tar.xz")
echo "$build/pack.tar.xz: $((bytes >> 20)) MB"
if [ "$bytes" -gt $((limit_mb << 20)) ]; then echo "larger than $limit_mb MB" >&2; exit 1; fi
