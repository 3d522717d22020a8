# make demo         set up .venv and run the demo (ARGS="--json", "--chaos", "--spot", ...)
# make demo-sparse  a few steps of a 19 M model at lr 1e-6: how small deltas are
# make check        lint, types, the unit tests that are not marked slow: before each commit
# make test         lint, types, import rule, all tests that need no GPU (PYTEST_ARGS="tests/unit ..." for some of them)
# make test-vllm    set up .venv-vllm (vLLM for the CPU), then the conformance suite with it
# make lint, make types, make layout, make setup, make clean
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
CPU_INDEX := https://download.pytorch.org/whl/cpu
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= $(shell nproc)
# Unit and swarm tests are pure or on a mock clock. Those with real processes wait patiently (tests/support/watchdog.py); emulated
# networks go one after the other in one worker (tests/conftest.py).
WORKERS := -n $(JOBS) --maxprocesses 8 --dist
PARALLEL := $(WORKERS) worksteal
SLOWEST := --durations=15 --durations-min=1

.PHONY: help demo demo-sparse check test test-vllm lint types layout setup clean check-build

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)
	@$(BIN)/shoal demo $(ARGS)

demo-sparse: $(STAMP)
	@$(BIN)/shoal demo --recipe sparse $(ARGS)

check: lint types
	$(BIN)/python -m pytest $(PARALLEL) $(SLOWEST) -m 'not slow' tests/unit

test: lint types
ifeq ($(strip $(PYTEST_ARGS)),)
	$(BIN)/python -m pytest $(PARALLEL) $(SLOWEST) tests/unit tests/swarm
	$(BIN)/python -m pytest $(WORKERS) loadscope $(SLOWEST) tests/e2e tests/wan tests/gpu
else
	$(BIN)/python -m pytest $(SLOWEST) $(PYTEST_ARGS)
endif

test-vllm: $(STAMP) $(VLLM_VENV)
	SHOAL_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest tests/e2e/test_vllm.py $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# What breaks the layout rules: circles, arrows up, names twice, long modules, constants without a sentence.
layout: $(STAMP)
	@$(BIN)/python -m tests.support.layout

setup: $(STAMP)

# fastecdsa, which libp2p needs, has no wheel and compiles against GMP.
check-build:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "Shoal needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..." >&2; exit 1; }
	@missing=""; \
	command -v gcc >/dev/null || missing="$$missing gcc"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	if command -v gcc >/dev/null; then \
	  echo '#include <gmp.h>' | gcc -E - >/dev/null 2>&1 || missing="$$missing libgmp-dev"; \
	  echo '#include <Python.h>' | gcc -E -I"$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" - >/dev/null 2>&1 \
	    || missing="$$missing python3-dev"; \
	fi; \
	if [ -n "$$missing" ]; then echo "Missing to build libp2p's dependencies:$$missing. On Debian or Ubuntu: apt-get install$$missing" >&2; exit 1; fi

# On a machine without a GPU the CPU build of torch, so that no CUDA package comes in.
$(STAMP): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory check-build
	@echo "setting up $(VENV) (a few minutes the first time) ..." >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install -q $(TORCH) -c constraints.txt >&2; \
	else $(BIN)/pip install -q '$(TORCH)+cpu' -c constraints.txt >&2 2>/dev/null \
	  || $(BIN)/pip install -q '$(TORCH)+cpu' --index-url $(CPU_INDEX) --extra-index-url https://pypi.org/simple >&2; fi
	@$(BIN)/pip install -q -e '.[dev]' -c constraints.txt >&2
	@$(BIN)/python -c "from p2p.codec import warm; warm()"
	@touch $@

$(VLLM_VENV): $(VLLM_STAMP)

# --no-deps: see constraints-vllm.txt.
$(VLLM_STAMP): constraints-vllm.txt
	@echo "setting up $(VLLM_VENV) (2.3 GB) ..." >&2
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip install -q '$(TORCH)+cpu' >&2 2>/dev/null \
	  || $(VLLM_VENV)/bin/pip install -q '$(TORCH)+cpu' --index-url $(CPU_INDEX) --extra-index-url https://pypi.org/simple >&2
	@$(VLLM_VENV)/bin/pip install -q --no-deps -r constraints-vllm.txt >&2
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis
