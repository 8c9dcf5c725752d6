# `make demo` and `make test` are all you need; both work in a fresh clone with Python, make and a C++ compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without PyTorch's types there is nothing to check training against, as there is nothing to test it with.
WITHOUT_TORCH := --exclude src/bitmtp/training/ --follow-imports=silent
SOURCES := $(shell find src/bitmtp/backends/cpu/native CMakeLists.txt pyproject.toml -type f 2>/dev/null)

.PHONY: demo test check format clean

demo: $(VENV)/.installed
	$(BIN)/bitmtp generate "Write a Python function that returns the n-th Fibonacci number." --max-tokens 256

test: $(VENV)/.installed-dev check
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $$($(BIN)/python -c 'import torch' 2>/dev/null || echo $(WITHOUT_TORCH))

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf build $(VENV)
