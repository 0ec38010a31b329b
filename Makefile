# Everything here needs Python >= 3.10 with venv and a C++20 compiler; cmake, ninja and the rest
# come from pip into build/. Each step leaves a stamp, so a repeated call does what has changed.

PYTHON ?= python3
# Resolved before PATH changes below, so that an environment is never made by itself.
override PYTHON := $(shell command -v $(PYTHON))
# What `pip install` is given to get torch, which only the tests use. On Linux PyPI's own torch is
# a CUDA build of several GB. For a CPU build:
#   make test TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
# Workers of the Python tests: each has models of its own.
PYTEST_JOBS ?= $(shell echo $$(($(JOBS) < 4 ? $(JOBS) : 4)))
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
BENCH_ARGS ?=
# Where the virtual environments and builds go.
BUILD := build
# A trained drafter for the demo's model.
HEAD := models/smollm2-eagle3

DEMO := $(BUILD)/venv-demo
TEST := $(BUILD)/venv-test
TOOLS := $(BUILD)/venv-build
WHEELS := $(BUILD)/wheels
BIN := $(abspath $(TEST)/bin)
PIP := -m pip --disable-pip-version-check
CXX_SOURCES := $(shell find include src cuda python/bindings cmake -type f 2>/dev/null) CMakeLists.txt
PACKAGE := $(CXX_SOURCES) pyproject.toml README.md LICENSE \
  $(shell find python/specrt '(' -name '*.py*' -o -name '*.json' -o -name '*.html' ')' -not -path '*/__pycache__/*' 2>/dev/null)
BENCH_OF ?= gemm
BENCH := $(shell find bench -type f 2>/dev/null)
NATIVE := $(CXX_SOURCES) CMakePresets.json \
  $(shell find tests/native tests/cuda_logic tests/cuda_device -type f 2>/dev/null)
CXX_FORMATTED = $(shell find include src cuda python/bindings tests/native tests/cuda_logic \
  tests/cuda_device examples bench \
  -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')
PY_CHECKED = python scripts tests

export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-native test-python lint stubs format sanitize mutants bench wheel clean \
  cuda-compile

help:
	@echo "make demo      build, fetch a small model, generate with and without speculation"
	@echo "make test      native and Python tests"
	@echo "make lint      ruff, mypy, clang-format, type stubs up to date"
	@echo "make sanitize  native tests under address, undefined-behaviour and thread sanitizers"
	@echo "make mutants   break the sources in known ways; the native tests must notice each"
	@echo "make bench     time the products; BENCH_OF=attention, forward, sampling or trees: those"
	@echo "make cuda-compile  build the CUDA kernels (no GPU needed), test their logic on the CPU"
	@echo "make format    format C++ and Python"
	@echo "make stubs     write python/specrt/_core.pyi anew"
	@echo "make wheel     build a wheel into dist/"
	@echo "make clean     remove build/ and dist/"

# --- the wheel, which both environments below install --------------------------------------------

$(TOOLS)/.venv: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "specrt needs Python >= 3.10")'
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python $(PIP) install 'cmake>=3.24' 'ninja>=1.11' \
	  $$($(TOOLS)/bin/python scripts/requirements.py build)
	touch $@

# Without isolation the build folder keeps its objects, so a change costs one file's compilation.
$(WHEELS)/.built: $(TOOLS)/.venv $(PACKAGE)
	rm -rf $(WHEELS)
	$(TOOLS)/bin/python $(PIP) wheel -v --no-deps --no-build-isolation \
	  -C build-dir=$(BUILD)/wheel -w $(WHEELS) .
	touch $@

# $(call install,environment): pip would keep what it has where the version is the same.
install = $(1)/bin/python $(PIP) uninstall -q -y specrt && \
  $(1)/bin/python $(PIP) install $(WHEELS)/specrt-*.whl

# --- what a user has: the package alone, no torch --------------------------------------------

$(DEMO)/.venv:
	$(PYTHON) -m venv --clear $(DEMO)
	touch $@

$(DEMO)/.installed: $(DEMO)/.venv $(WHEELS)/.built
	$(call install,$(DEMO))
	touch $@

demo: $(DEMO)/.installed
	$(DEMO)/bin/python -m specrt demo \
	  $(if $(wildcard $(HEAD)/model.safetensors),--head $(HEAD))

# --- what a developer has -----------------------------------------------------------------------

$(TEST)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "specrt needs Python >= 3.10")'
	$(PYTHON) -m venv --clear $(TEST)
	$(TEST)/bin/python $(PIP) install --upgrade pip
	touch $@

# torch first and by name, so that the range in the test extra is met and never fetches another.
$(TEST)/.tools: $(TEST)/.venv pyproject.toml
	$(TEST)/bin/python $(PIP) install $(TORCH)
	$(TEST)/bin/python $(PIP) install \
	  $$($(TEST)/bin/python scripts/requirements.py build project test dev)
	touch $@

$(TEST)/.installed: $(TEST)/.tools $(WHEELS)/.built
	$(call install,$(TEST))
	touch $@

$(BUILD)/%/.built: $(TEST)/.tools $(NATIVE)
	cmake --preset $*
	cmake --build --preset $*
	touch $@

test: test-native test-python

test-native: $(BUILD)/dev/.built
	$(BUILD)/dev/tests/native/specrt_tests --jobs=$(JOBS)

test-python: $(TEST)/.installed
	$(TEST)/bin/python -m pytest tests/python --wheel $(WHEELS)/specrt-*.whl \
	  -n $(PYTEST_JOBS) --dist loadfile $(PYTEST_ARGS)

# What never leaves one thread has nothing to show the thread sanitizer.
ONE_THREAD := -kernels_ -rejection_ -kv_cache_ -suffix_trie_ -suffix_index_ -filter_ -philox_ -pack_ \
  -rank_ -typical_ -block_

sanitize: $(BUILD)/asan-ubsan/.built $(BUILD)/tsan/.built
	ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(BUILD)/asan-ubsan/tests/native/specrt_tests --jobs=$(JOBS)
	TSAN_OPTIONS=halt_on_error=1 $(BUILD)/tsan/tests/native/specrt_tests --jobs=$(JOBS) $(ONE_THREAD)

# nvcc is this machine's or comes from PyPI, CUTLASS's headers come from PyPI. No driver, no GPU: what
# is built is looked at, loaded, and its logic run on the CPU. It is built where the native tests are,
# so that the core is compiled once; from then on that library has CUDA in it.
CUDA := $(BUILD)/dev
CUDA_TOOLS := $(abspath $(BUILD)/cuda-tools)

$(CUDA_TOOLS)/.cutlass: $(TEST)/.tools
	$(TEST)/bin/python $(PIP) install --no-deps --target $(CUDA_TOOLS) nvidia-cutlass==4.2.0.0
	touch $@

$(CUDA)/.cuda: $(CUDA_TOOLS)/.cutlass $(NATIVE) $(BENCH) scripts/cuda_toolkit.py
	root=$$($(TEST)/bin/python scripts/cuda_toolkit.py $(CUDA_TOOLS)) && \
	  cmake --preset dev -DSPECRT_CUDA=ON -DCMAKE_CUDA_COMPILER=$$root/bin/nvcc \
	    -DCUDAToolkit_ROOT=$$root -DCUTLASS_DIR=$(CUDA_TOOLS)/cutlass_library/source
	cmake --build --preset dev --target specrt specrt_cuda_logic specrt_cuda_loads \
	  specrt_cuda_device bench_cuda
	touch $@

cuda-compile: $(CUDA)/.cuda
	$(CUDA)/tests/cuda_logic/specrt_cuda_logic --jobs=$(JOBS)
	$(CUDA)/tests/cuda_logic/specrt_cuda_loads
	$(TEST)/bin/python scripts/cuda_sass.py $(CUDA)/libspecrt.so --tools $(CUDA_TOOLS)

# A copy of the sources, built anew in a temporary folder: nothing here is touched.
mutants: $(TEST)/.tools
	$(TEST)/bin/python scripts/mutants.py --jobs $(JOBS) $(MUTANTS_ARGS)

$(BUILD)/bench/.built: $(BENCH)

bench: $(BUILD)/bench/.built
	$(BUILD)/bench/bench/bench_$(BENCH_OF) $(BENCH_ARGS)

lint: $(TEST)/.installed
	ruff check $(PY_CHECKED)
	ruff format --check $(PY_CHECKED)
	$(TEST)/bin/python -m mypy python/specrt
	clang-format --dry-run -Werror $(CXX_FORMATTED)
	$(TEST)/bin/python scripts/stubs.py --check

format: $(TEST)/.tools
	ruff check --fix $(PY_CHECKED)
	ruff format $(PY_CHECKED)
	clang-format -i $(CXX_FORMATTED)

stubs: $(TEST)/.installed
	$(TEST)/bin/python scripts/stubs.py

wheel: $(WHEELS)/.built
	mkdir -p dist
	cp $(WHEELS)/specrt-*.whl dist/

clean:
	rm -rf $(BUILD) dist
