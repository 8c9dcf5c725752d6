# `make demo` and `make test` are all you need; both work in a fresh clone with Python, make and a C++ compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without PyTorch's types there is nothing to check training against, as there is nothing to test it with.
WITHOUT_TORCH := --exclude src/bitmtp/training/ --follow-imports=silent
SOURCES := $(shell find src/bitmtp/backends/cpu/native src/bitmtp/core CMakeLists.txt pyproject.toml -type f -not -name "*.so" 2>/dev/null)

LOWEST := .venv-lowest/bin/python
FAST := $(wildcard tests/test_*.py) tests/convert tests/server tests/cli/test_errors.py tests/cli/test_generate.py tests/cli/test_convert.py

.PHONY: demo test lowest check format clean

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
