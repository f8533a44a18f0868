# Everything from a clean clone: `make demo`, `make test`. Needs Python 3.11 or newer, and nothing else.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ENGINE ?= transformers
# The first interpreter that is new enough; PYTHON=... names another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && { echo "$$p"; break; }; done)

BIN := .venv/bin
READY := .venv/.ready
TIMES := --durations=10 --durations-min=2
# Two processes share out what runs in them by tests/conftest.py.
TWO := --numprocesses 2 --dist loadscope --no-loadscope-reorder
# Prints the path of an engine's environment or of a model, building it first if need be.
ENSURE := $(BIN)/python -m midstream.sidecar.environments ensure

# On a machine with a GPU: its own interpreter with CUDA's packages and vLLM, and a folder with a model (docs/gpu.md).
GPU_PYTHON ?= python3
GPU_HOME ?= /tmp/midstream-gpu
GPU_PATH = mkdir -p $(GPU_HOME)/place; eval "$$($(GPU_PYTHON) loadtest/gpu/place.py $(GPU_HOME)/place)"; \
	if [ -d $(GPU_HOME)/site ]; then export PYTHONPATH="$$PYTHONPATH:$(GPU_HOME)/site"; fi

.PHONY: help demo test test-sglang test-tp test-fleet test-fast lint bench soak sim test-gpu bench-gpu clean

help:
	@echo 'make demo [ENGINE=vllm]  a streamed answer survives the kill of its worker (or ENGINE=sglang)'
	@echo 'make test                lint, types, all tests; vLLM, SGLang and the embedded engine for real'
	@echo 'make test-sglang         all tests of a real SGLang'
	@echo 'make test-tp             a real vLLM of two ranks: many interruptions in a row'
	@echo 'make test-fleet          several hosts, as namespaces: lost, cut off, slow (root, Linux)'
	@echo 'make test-fast           the same without engines, under a minute'
	@echo 'make lint                lint and types alone'
	@echo 'make bench               what the proxy costs'
	@echo 'make soak                many kills in a row on both engines'
	@echo 'make sim                 thousands of seeded failure schedules for whole fleets, in virtual time'
	@echo 'make test-gpu, bench-gpu on a machine with a GPU: see docs/gpu.md'

# Set-up goes by what the project asks for: a change of pyproject.toml makes it run again.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo 'midstream needs Python 3.11 or newer; name it with make PYTHON=/path/to/python3.11'; exit 1; }
	@echo 'setting up .venv'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[sidecar]' --group dev
	@touch $@

demo: $(READY)
	@$(BIN)/midstream demo --engine $(ENGINE) $(DEMO)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test-fast: lint
	$(BIN)/pytest -q -o asyncio_debug=true -m 'not engine and not service and not gpu and not apart' $(TIMES) $(TESTS)

test: lint
	@echo 'engines: the first time this takes some minutes and about 9 GB'
	@export MIDSTREAM_TEST_TRANSFORMERS_PYTHON="$$($(ENSURE) transformers)"
	export MIDSTREAM_TEST_TINY_MODEL="$$($(ENSURE) tiny-model)"
	export MIDSTREAM_TEST_MODEL="$$($(ENSURE) model)"
	export MIDSTREAM_TEST_VLLM_PYTHON="$$($(ENSURE) vllm)"
	export MIDSTREAM_TEST_SGLANG_PYTHON="$$($(ENSURE) sglang)"
	# Where they cannot be had their tests are skipped, and say so.
	export MIDSTREAM_TEST_ETCD="$$($(ENSURE) etcd)"
	export MIDSTREAM_TEST_MOONCAKE_PYTHON="$$($(ENSURE) mooncake)"
	# Wide enough that a failure's line at the end names its reason.
	export COLUMNS=240
	suite() { $(BIN)/pytest -v -ra $(TIMES) "$$@" $(TESTS) || { code=$$?; [ $$code = 5 ] || return $$code; }; }
	# Two cores: what needs no engine is told first; then vLLM's tests in one process and those of all other engines beside
	# it, for a start of an engine keeps one core busy.
	suite -m 'not engine and not service and not gpu and not apart' $(TWO)
	suite -m '(engine or service) and not gpu and not apart' $(TWO)

# All of them, also those for which there is no time in `make test`; one has a vLLM beside it.
test-sglang: $(READY)
	@echo 'SGLang: the first time this takes some minutes and about 6 GB'
	@export MIDSTREAM_TEST_MODEL="$$($(ENSURE) model)"
	export MIDSTREAM_TEST_SGLANG_PYTHON="$$($(ENSURE) sglang)"
	export MIDSTREAM_TEST_VLLM_PYTHON="$$($(ENSURE) vllm)"
	$(BIN)/pytest -v -ra $(TIMES) $(or $(TESTS),tests/adapters/sglang tests/cases -k sglang)

test-tp: $(READY)
	@export MIDSTREAM_TEST_MODEL="$$($(ENSURE) model)"
	export MIDSTREAM_TEST_VLLM_PYTHON="$$($(ENSURE) vllm)"
	$(BIN)/pytest -v -raP $(TIMES) $(or $(TESTS),tests/adapters/vllm/test_engine_tensor_parallel.py)

test-fleet: $(READY)
	@export MIDSTREAM_TEST_TRANSFORMERS_PYTHON="$$($(ENSURE) transformers)"
	export MIDSTREAM_TEST_TINY_MODEL="$$($(ENSURE) tiny-model)"
	export MIDSTREAM_TEST_ETCD="$$($(ENSURE) etcd)"
	export MIDSTREAM_TEST_MOONCAKE_PYTHON="$$($(ENSURE) mooncake)"
	$(BIN)/pytest -v -raP $(TIMES) $(or $(TESTS),tests/e2e/test_hosts.py tests/e2e/test_fleet_*.py)

bench: $(READY)
	$(BIN)/python -m midstream.loadtest.proxy_bench $(BENCH)

soak: $(READY)
	$(BIN)/python -m midstream.loadtest.soak $(SOAK)

# SIM='--first N --seeds 1' is one of them again; SIM='--nodes 500' is one large fleet.
sim: $(READY)
	PYTHONPATH=tests PYTHONHASHSEED=0 $(BIN)/python -m simulation.fleet $(SIM)

test-gpu:
	@$(GPU_PATH)
	export MIDSTREAM_TEST_GPU_HOME=$(GPU_HOME)
	$(GPU_PYTHON) -m pytest -v -ra -m gpu -W default $(TIMES) $(or $(TESTS),tests/gpu)

bench-gpu:
	@$(GPU_PATH)
	$(GPU_PYTHON) -m midstream.loadtest.gpu $(or $(PARTS),probe copy overhead gap exact) --home $(GPU_HOME) $(BENCH)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.ONESHELL:
