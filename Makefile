# Every target sets up what it needs: a virtual environment in .venv with the versions of
# constraints.txt, and the extension rebuilt when its sources change. `make gpu-test` and
# `make bench` are the exceptions: they use the python3 they are given, and no network.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

JOBS ?= $(shell nproc)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

# The first interpreter that can make a virtual environment and compile an extension.
USABLE := import ensurepip, os, sys, sysconfig, venv; \
  sys.exit(not (sys.version_info >= (3, 10) and \
    os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3; do \
  if command -v "$$p" >/dev/null && "$$p" -c '$(USABLE)' 2>/dev/null; then echo "$$p"; break; fi; done)

PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
NATIVE_SOURCES := $(shell find native -type f) pyproject.toml
CXX_SOURCES = $(shell find native tests -name '*.cpp' -o -name '*.hpp')
PYTHON_SOURCES := $(wildcard stagehand_alloc tests benchmarks tools examples)

.PHONY: help
help:
	@echo "make demo      train a small model inside a budget it does not fit (simulated GPU: no GPU needed)"
	@echo "make test      Python and native tests on the simulated GPU, the native ones under sanitizers"
	@echo "make check     formatting, lint, types, layout, tests with threads under the thread sanitizer"
	@echo "make fuzz      ten million random operations, every driver call failing in turn: half an hour"
	@echo "make format    reformat the sources"
	@echo "make gpu-test  tests/gpu on a real GPU, with the python3 of this machine"
	@echo "make bench     all benchmarks on a real GPU, with the python3 of this machine"
	@echo "make docs      the documentation's pages, into build/site"
	@echo "make wheel     sdist and wheels into dist/, each tried where there is no compiler"
	@echo "make test-torch TORCH=2.11.0   the tests of what depends on torch, with another torch"
	@echo "make clean     remove everything built"

# ---- set-up ------------------------------------------------------------------------------------
$(VENV)/.created:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "No Python >= 3.10 with venv and its C headers was found."; \
	  echo "Install them (on Debian: python3-venv python3-dev), or name one: make PYTHON=/path/to/python3"; \
	  exit 1; fi
	@echo "set-up: virtual environment with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.tools: $(VENV)/.created constraints.txt
	@echo "set-up: build tools"
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

# Python sources are used where they stand (an editable install); only native ones need a rebuild.
$(VENV)/.installed: $(VENV)/.tools $(NATIVE_SOURCES)
	@echo "set-up: torch, cuda-python and tools where they are missing; building the extension"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation --editable '.[test,dev,docs]'
	@touch $@

.PHONY: setup
setup: $(VENV)/.installed

# ---- what people run ---------------------------------------------------------------------------
.PHONY: demo
demo: setup
	@$(PY) -m stagehand_alloc demo

# What does not need each other runs beside each other: the Python suite waits a good deal, and
# compiling does not.
BESIDE := +@$(MAKE) --no-print-directory --output-sync=target -j 2

# The native tests need no torch: they are built while it is installed.
.PHONY: test
test: $(VENV)/.tools
	$(BESIDE) test-python test-native

# One process a core, so torch needs no threads of its own.
.PHONY: test-python
test-python: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal --durations 40

.PHONY: test-native
test-native: $(VENV)/.tools
	$(call native-tests,address,-DSTAGEHAND_CHECKS=1 -DSTAGEHAND_SANITIZE=address $(UNITY))
	$(CTEST) --test-dir build/address

.PHONY: check
check: setup
	$(BESIDE) check-text check-threads

.PHONY: check-text
check-text: check-format check-lint check-types check-layout docs

.PHONY: check-format
check-format: setup
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

.PHONY: check-lint
check-lint: setup
	$(BIN)/ruff check $(PYTHON_SOURCES)

.PHONY: check-types
check-types: setup
	$(BIN)/mypy
	$(call types,tests/python tests/conftest.py tests/proofs.py,tests/python:tests:tools:benchmarks)
	$(call types,tests/gpu,tests/gpu:tests/python:tests:benchmarks)
	$(if $(wildcard tests/judgement),$(call types,tests/judgement,tests/judgement:tests/python:tests))
	$(call types,benchmarks,benchmarks:tools:tests/gpu)
	$(call types,tools examples,tools)

# types(what, where its own imports are): annotated in full, but looser than the package: a gradient
# is not None there, and autograd's nodes have the attributes they have.
TYPES := $(BIN)/mypy --explicit-package-bases --allow-untyped-calls --no-warn-return-any \
  --no-warn-unused-ignores --no-strict-optional --allow-subclassing-any --implicit-reexport \
  --ignore-missing-imports --disable-error-code union-attr --cache-dir .mypy_cache/looser
define types
	@MYPYPATH=$(2) $(TYPES) $(1)
endef

.PHONY: check-layout
check-layout: setup
	$(PY) -m pytest -q tests/python/test_layout.py

# Strict: a link that leads nowhere ends it.
.PHONY: docs
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

.PHONY: check-threads
check-threads: $(VENV)/.tools
	$(call native-tests,thread,-DSTAGEHAND_CHECKS=1 -DSTAGEHAND_SANITIZE=thread $(UNITY),--target native_tests)
	$(CTEST) --test-dir build/thread

# docs/testing.md. SEED=n: that seed alone, printed as short as it still fails; PROGRAM=file: a
# program that was printed.
FUZZ := build/release/stagehand_fuzz
FUZZ_SEEDS := 1000
FUZZ_OPS := 5000
FUZZ_SWEEPS := 150

.PHONY: fuzz
fuzz: setup
	$(call native-tests,release,-DSTAGEHAND_CHECKS=1,--target stagehand_fuzz native_tests)
ifdef PROGRAM
	$(FUZZ) --program $(PROGRAM) --trace
else ifdef SEED
	$(FUZZ) --seed $(SEED) --ops $(FUZZ_OPS)
else
	+@$(MAKE) --no-print-directory --keep-going -j 2 fuzz-allocator fuzz-torch
	STAGEHAND_SEEDS=all $(CTEST) --test-dir build/release --tests-regex native_test
	$(if $(wildcard tests/judgement),STAGEHAND_JUDGEMENT=all $(PY) -m pytest -q -n 2 tests/judgement)
endif

# One process each.
.PHONY: fuzz-allocator fuzz-torch
fuzz-allocator fuzz-torch: fuzz-%:
	$(FUZZ) --store $* --seeds $(FUZZ_SEEDS) --ops $(FUZZ_OPS); random=$$?; \
	$(FUZZ) --store $* --seeds $(FUZZ_SWEEPS) --sweep && exit $$random

.PHONY: format
format: setup
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(BIN)/ruff check --fix-only $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(CXX_SOURCES)

.PHONY: clean
clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
	rm -rf stagehand_alloc/_sim stagehand_alloc/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- other versions of torch ---------------------------------------------------------------------
# The oldest that is promised, and the newest. A wheel of ours beside that torch in an environment of
# its own, and the tests of what rests on torch: the libraries built against it, the bridge, autograd.
OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.14.1
TORCH ?= $(OLDEST_TORCH)
TORCH_TESTS := trigger_source tensor_library cpu_bridge training_autograd attach weights weights_access
OTHER = build/torch-$(TORCH)

build/torch-%/.created: $(VENV)/.tools constraints.txt
	@echo "set-up: torch $* in $(@D)"
	@$(PYTHON) -m venv --clear $(@D)
	@grep -v -E '^(torch|triton|nvidia-|cuda-|setuptools|sympy|networkx|fsspec)' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet \
	  --constraint $(@D)/constraints.txt torch==$* cuda-python nvidia-cuda-runtime nvidia-cuda-crt \
	  numpy pytest pytest-timeout expecttest
	@touch $@

.PHONY: test-torch
test-torch: setup $(OTHER)/.created
	@rm -rf $(OTHER)/wheel
	@$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation -w $(OTHER)/wheel .
	@$(OTHER)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	  --force-reinstall $(OTHER)/wheel/*.whl
	OMP_NUM_THREADS=1 $(OTHER)/bin/pytest -q -p no:cacheprovider \
	  $(TORCH_TESTS:%=tests/python/test_%.py)

.PHONY: test-torch-ends
test-torch-ends:
	@$(MAKE) --no-print-directory test-torch TORCH=$(OLDEST_TORCH)
	@$(MAKE) --no-print-directory test-torch TORCH=$(NEWEST_TORCH)

# ---- what is given to others -------------------------------------------------------------------
# The wheel of Python 3.12 is for later ones too; 3.10 and 3.11 have one each.
WHEEL_PYTHONS ?= $(PYTHON) $(firstword $(shell command -v python3.12) \
  $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python))

.PHONY: wheel
wheel: setup
	$(PY) tools/wheels.py build $(WHEEL_PYTHONS)
	$(PY) tools/wheels.py try $(WHEEL_PYTHONS)

# What is compiled once and not worked on: the core's sources several at a time.
UNITY := -DCMAKE_PROJECT_stagehand_alloc_INCLUDE=$(CURDIR)/tests/native/unity.cmake

CTEST := $(BIN)/ctest --output-on-failure --no-tests=error -j $(JOBS)
# native-tests(folder under build, options, what to build)
define native-tests
	@$(BIN)/cmake -S native -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DSTAGEHAND_TESTS=ON $(2) >/dev/null
	@$(BIN)/cmake --build build/$(1) -j $(JOBS) $(3)
endef

# ---- on a machine with a GPU: its own python3 (with torch, cuda-python, cmake, ...), no network ----
GPU_PYTHON ?= python3

.PHONY: gpu-build
gpu-build:
	cmake -S native -B build/gpu -G Ninja -DSTAGEHAND_PYTHON=ON -DSTAGEHAND_INPLACE=ON \
	  -DSTAGEHAND_GPU_STRESS=ON -DPython_EXECUTABLE="$$($(GPU_PYTHON) -c 'import sys; print(sys.executable)')"
	cmake --build build/gpu -j $(JOBS)

.PHONY: gpu-test
gpu-test: gpu-build
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) tests/gpu/run.py

.PHONY: bench
bench: gpu-build
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/main_job.py
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/transfers.py
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/modes.py
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/suite.py
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/workloads.py
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/recompute.py
	-PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/weights.py
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/micro.py
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/people.py

# What people train, alone: BENCH="--quick --only gpt,moe".
.PHONY: bench-workloads
bench-workloads: gpu-build
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/workloads.py $(BENCH)

# What is promised to people: in about 4 minutes, each row written as it comes. PEOPLE="--only advise".
PEOPLE_OUT ?= benchmarks/results/people.json
.PHONY: bench-people
bench-people: gpu-build
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) benchmarks/people.py --out "$(PEOPLE_OUT)" $(PEOPLE)

# ---- the engine on the simulated GPU, beside version 0.1: no GPU ---------------------------------
.PHONY: bench-engine
bench-engine: setup
	$(PY) benchmarks/engine.py --jobs $(JOBS)
