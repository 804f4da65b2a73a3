# Each target creates the environment that it needs; a clone, make and Python >= 3.11 are enough.

VENV := .venv
MINIMUM := 3.11
CANDIDATES := python3.13 python3.12 python3.11 python3

# The first candidate that runs (a shim of a version manager may fail), is new enough and can create
# environments, and its version. `make test PYTHON=python3.13` selects a different Python.
PROBE := import sys, venv, ensurepip; \
         assert sys.version_info >= tuple(map(int, '$(MINIMUM)'.split('.'))); \
         print('%d.%d.%d' % sys.version_info[:3])
FOUND := $(shell for python in $(or $(PYTHON),$(CANDIDATES)); do \
           version=$$("$$python" -c "$(PROBE)" 2>/dev/null) && echo "$$python $$version" && break; done)
INTERPRETER := $(firstword $(FOUND))

BIN := $(VENV)/bin
# The version is part of the name, so a different Python creates a new environment.
TEST_READY := $(VENV)/.ready-$(lastword $(FOUND))-test
DEV_READY := $(VENV)/.ready-$(lastword $(FOUND))-dev
DOCS_READY := $(VENV)/.ready-$(lastword $(FOUND))-docs

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Compile C sources that have changed. `make native` must succeed; in other targets this step may fail,
# and the NumPy kernels are used.
BUILD = $(BIN)/python setup.py -q build_ext --inplace

# The sources for devices are excluded: macros make them OpenCL C and CUDA C.
C_FILES = $(shell find mlvm examples bench tests -name '*.[ch]' -not -path '*/gpu/*')
CPPCHECK := --quiet --std=c11 --enable=warning,performance,portability --inline-suppr \
            --suppress=missingInclude --suppress=unknownMacro --suppress=ctunullpointer \
            -D__x86_64__ -DTARGET=plain --error-exitcode=1

.PHONY: help native extension demo test fuzz-c sanitize lint lines coverage format bench example-c wheel docs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(or $(INTERPRETER),none found) VENV=$(VENV)"

native: $(TEST_READY) ## compile the C sources that have changed, in place
	MLVM_NATIVE=1 $(BUILD)

extension: $(TEST_READY)
	@$(BUILD)

demo: extension ## train a small MLP-Mixer on the digits
	$(BIN)/python -m models.train --model mlp_mixer --data digits --epochs 20 --seed 0

test: $(TEST_READY) ## run the tests on all cores with every instruction set; LONG=1: also the long tests
	@MLVM_TARGETS=all $(BUILD)
	PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(if $(LONG),--long)

fuzz-c: extension ## fuzz the loop and built steps without Python, under sanitizers
	$(BIN)/python -m tests.fuzz built

sanitize: $(TEST_READY) ## run the native machine's tests under the compiler's sanitizers
	$(BIN)/python -m tests.sanitize

lint: $(DEV_READY) ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m mlvm.eager.stub
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@if command -v cppcheck >/dev/null; then cppcheck $(CPPCHECK) $(filter %.c,$(C_FILES)); \
	else echo "cppcheck is not installed: C was not checked"; fi

lines: $(TEST_READY) ## print the lines of code of each package
	$(BIN)/python -m tests.lines

coverage: $(DEV_READY) ## print the coverage of C (gcov) and of Python (coverage.py)
	$(BIN)/python -m tests.cover
	-$(BIN)/python -m coverage run -m pytest --long -n 0
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

format: $(DEV_READY) ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(C_FILES)

bench: extension ## compare one eager op with other libraries
	$(BIN)/python -m bench dispatch

example-c: build/example_c.so ## compile the example of host functions in C

build/example_c.so: examples/c/functions.c mlvm/machines/mlvm.h
	@mkdir -p $(@D)
	$(CC) -std=c99 -O2 -Wall -Wextra -Wpedantic -fPIC -shared -I mlvm/machines -o $@ $< -lm

wheel: $(TEST_READY) ## build the source distribution and the wheel into dist/
	$(BIN)/python -m build --no-isolation

docs: $(DOCS_READY) ## build the documentation site, build/site/index.html
	$(BIN)/python -m docs.pages build/pages
	$(BIN)/zensical build --strict
	@echo "build/site/index.html; with its search: python3 -m http.server -d build/site"

clean: ## remove all files that make, the tests and the tools have created
	rm -f mlvm/machines/native/_native*.so
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A new environment replaces an environment that make created. An environment that the user created
# keeps its contents. Any other folder raises an error.
$(TEST_READY): pyproject.toml
	@test -n "$(INTERPRETER)" || { \
	echo "No suitable Python among: $(or $(PYTHON),$(CANDIDATES))." >&2; \
	echo "It must run, be $(MINIMUM) or newer and have the modules venv and ensurepip." >&2; \
	echo "Name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -z "$$(ls -A "$(VENV)" 2>/dev/null)" || test -e "$(VENV)/pyvenv.cfg" || { \
	echo "VENV=$(VENV) exists and is not a Python environment" >&2; exit 1; }
	$(INTERPRETER) -m venv $(if $(wildcard $(VENV)/.ready-*),--clear) "$(VENV)"
	@echo "Installing mlvm and compiling its kernels for this processor: a minute or two of two cores"
	$(BIN)/python -m pip install -qq --editable '.[test]'
	@touch $@

$(DEV_READY): $(TEST_READY)
	$(BIN)/python -m pip install -qq --editable '.[dev]'
	@touch $@

$(DOCS_READY): $(TEST_READY)
	$(BIN)/python -m pip install -qq --editable '.[docs]'
	@touch $@
