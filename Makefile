# The two commands: `make run` and `make test`. Each does its whole set-up first; the second time that takes no time.
#
# Variables:  PYTHON=python3.12            the interpreter of the virtual environment (3.11 or newer)
#             CONSTRAINTS=file             versions to install, instead of ci/constraints.txt
#             TORCH_SPEC="torch==2.11.0"   torch alone, instead of the constraints' line
#             GRISTMILL_CUDA=auto|on|off   the CUDA part of the native build
#             GRISTMILL_HIP=auto|on|off    the HIP part, for AMD GPUs
#             GRISTMILL_RARE=on|off        its instances that are marked rare; `make test` in a new tree builds without them
#             VENV=directory               instead of .venv
#             JOBS=2                       test processes and compilers at a time

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.ONESHELL:

PYTHON ?= python3
CONSTRAINTS ?= ci/constraints.txt
TORCH_SPEC ?=
VENV ?= .venv
JOBS ?= 2

# Absolute, so that recipes may change directory. No activation: programs are called by path.
VENV_DIR := $(abspath $(VENV))
PY := $(VENV_DIR)/bin/python
export PATH := $(VENV_DIR)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A thread that waits for its siblings gives its core back after a tenth of a millisecond, not after three: where others use
# the cores too, the default costs ten times more time than it saves.
export GOMP_SPINCOUNT ?= 10000
# pip builds the native libraries with as many jobs as `make build` does.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
unexport PYTHONPATH PYTHONHOME

# One key for everything the environment is made of: a change of any makes a new set-up.
KEY := $(shell { cat $(CONSTRAINTS) pyproject.toml; echo "$(TORCH_SPEC)" "$(PYTHON)" "$(VENV_DIR)"; } 2>/dev/null | cksum | cut -d' ' -f1)
SETUP := $(VENV)/.setup-$(KEY)

.PHONY: help run test test-full hosts build lint format generate setup clean

help:  ## this list
	@echo "gristmill: LLM inference kernels, chosen by measurement"
	@echo
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo "Set-up (virtual environment, torch, native build) happens by itself. Variables: see the top of the Makefile."

run: build  ## two models answer on this machine, then a table by number format
	@if [ ! -f examples/run.py ]; then echo "examples/run.py is not in this tree: nothing to run" >&2; exit 1; fi
	@exec "$(PY)" examples/run.py

test hosts: export GRISTMILL_RARE ?= off
test-full: export GRISTMILL_RARE ?= on
# Memory that a test has freed serves the next one: to get it from the kernel again takes a tenth of the time. glibc wants both. Not for hosts:
# vLLM's cache is sized after the memory that a step takes, which such memory hides.
test test-full: export MALLOC_TRIM_THRESHOLD_ ?= 268435456
test test-full: export MALLOC_MMAP_THRESHOLD_ ?= 268435456

test: build  ## what CI runs: lint, types, import contracts, tests, wheels (under 15 minutes on 2 cores)
	@exec bash ci/test.sh "$(JOBS)"

test-full: build  ## test, with the slow tests, sanitizers everywhere and the whole compile matrix (under 75 minutes)
	@exec env GRISTMILL_FULL=1 bash ci/test.sh "$(JOBS)"

hosts: build  ## the tests inside vLLM, SGLang, Ray, Dynamo and other hosts (10 minutes, 15 the first time)
	@exec env JOBS="$(JOBS)" bash ci/hosts.sh

SET_UP = bash ci/setup.sh "$(PYTHON)" "$(VENV_DIR)" "$(CONSTRAINTS)" "$(SETUP)" "$(TORCH_SPEC)"

build: $(SETUP)  ## compile what changed; libraries land in src/gristmill/_lib
	@[ -f build/CMakeCache.txt ] || $(SET_UP)
	@if [ "$${GRISTMILL_RARE:-on}" = on ] && grep -q '^GRISTMILL_RARE:STRING=off' build/CMakeCache.txt; then
	  cmake -DGRISTMILL_RARE=on build
	fi
	cmake --build build --parallel $(JOBS)

lint: $(SETUP)  ## formatters, ruff, dead code, duplicates, mypy and the import contracts
	@exec bash ci/lint.sh

format: $(SETUP)  ## format Python, C++ and CUDA sources in place
	@ruff format --quiet .
	@git ls-files -z '*.cpp' '*.cu' '*.hip' '*.h' '*.cuh' '*.c' | xargs -0 clang-format -i

generate: build  ## write the generated pages, stubs and tables
	@"$(PY)" ci/generate.py

setup: $(SETUP)

$(SETUP):
	@exec $(SET_UP)

clean:  ## remove the virtual environment and everything built
	rm -rf "$(VENV)" build dist src/gristmill/_lib .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
