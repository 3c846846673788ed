# Everything a newcomer needs: `make demo` and `make test`. Both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo docs test test-faults test-gpu lint install clean

demo: $(VENV)/.installed
	$(BIN)/jcl demo

# Without bytecode every process of the tests would compile the package and rewrite the tests' assertions anew.
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Runs killed at many moments, and disks that fill up or turn read-only; those need the right to mount.
test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m faults

# On a machine with a GPU; uses the Python given, so that an environment that holds a CUDA build of PyTorch can be used.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src tests benchmarks examples docs hubconf.py
	$(BIN)/ruff format --check src tests benchmarks examples docs hubconf.py
	$(BIN)/mypy

# The pages as a site in build/docs; a broken link or a page that no other leads to is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python -m sphinx -W --keep-going --quiet docs build/docs
	@echo "The site starts at build/docs/index.html."

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "jcl needs Python 3.11 or newer; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group test --group lint
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist build
