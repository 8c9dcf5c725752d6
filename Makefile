# `make demo` and `make test` are all you need; both work in a fresh clone with Python, make and a C++ compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without PyTorch's types there is nothing to check training against, as there is nothing to test it with.
WITHOUT_TORCH := --exclude src/bitmtp/training/ --follow-imports=silent
SOURCES := $(shell find src/bitmtp/backends/cpu/native src/bitmtp/core CMakeLists.txt pyproject.toml -type f -not -name "*.so" 2>/dev/null)

LOWEST := .venv-lowest/bin/python
FAST := $(wildcard tests/test_*.py) tests/convert tests/server tests/cli/test_errors.py tests/cli/test_generate.py tests/cli/test_convert.py

# What runs in C++ for the most part.
NATIVE := tests/core tests/backends/test_cpu.py tests/backends/test_cpu_loop.py tests/backends/test_cpu_packing.py tests/test_ternary.py
CONFIGURE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_BUILD_TYPE=Release
LIBRARY = $(shell c++ -print-file-name=$(1))

.PHONY: demo test lowest sanitize check format clean

demo: $(VENV)/.installed
	$(BIN)/bitmtp generate "Write a Python function that returns the n-th Fibonacci number." --max-tokens 256
	@echo
	@echo "Next: $(BIN)/bitmtp chat    or: $(BIN)/bitmtp --help"

test: $(VENV)/.installed-dev check
	$(BIN)/python -m pytest

lowest:
	$(PYTHON) -m venv .venv-lowest
	$(LOWEST) -m pip install --quiet --disable-pip-version-check -c constraints/lowest.txt -e '.[convert,serve]' \
		httpx hypothesis jsonschema openai pytest
	$(LOWEST) -m pytest $(FAST)

# Python itself leaks on purpose; the sanitizer's library has to be there before it.
sanitize: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cmake ninja nanobind
	$(CONFIGURE) -B build/sanitize -DBITMTP_SANITIZE=address,undefined
	$(BIN)/cmake --build build/sanitize --target _core _native
	LD_PRELOAD="$(call LIBRARY,libasan.so) $(call LIBRARY,libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		$(BIN)/python tests/sanitizers/run.py build/sanitize $(NATIVE)
	$(CONFIGURE) -B build/threads -DBITMTP_SANITIZE=thread
	$(BIN)/cmake --build build/threads --target threads
	$(BIN)/python tests/sanitizers/run_threads.py build/threads/threads

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell README.md CHANGELOG.md docs src tests benchmarks
	$(BIN)/mypy $$($(BIN)/python -c 'import torch' 2>/dev/null || echo $(WITHOUT_TORCH))

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@echo "Making a virtual environment in $(VENV)."
	$(PYTHON) -m venv $(VENV)

# Not quiet: it compiles for a minute or two, and pip says that it does.
$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	@echo "Installing into $(VENV): some packages, then the kernels are compiled (a minute or two)."
	$(BIN)/python -m pip install --progress-bar off --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf build $(VENV) .venv-lowest
