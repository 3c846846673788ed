# Start with `make demo` and `make test`. Both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo docs test test-faults test-gpu lint install clean

demo: $(VENV)/.installed
	$(BIN)/jcl demo

# Without bytecode every process of the tests would compile the package and rewrite the tests' assertions again.
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Killed runs, lost hosts, and disks that fill up or turn read-only, which need the right to mount.
test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m 'faults or slow'

# Needs a GPU; uses $(PYTHON), so that you can choose an environment with a CUDA build of PyTorch.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

lint: $(VENV)/.installed-test
	$(BIN)/ruff check src tests benchmarks examples docs hubconf.py
	$(BIN)/ruff format --check src tests benchmarks examples docs hubconf.py
	$(BIN)/mypy

# Build the site in build/docs; broken links and orphan pages are errors.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python -m sphinx -W --keep-going --quiet docs build/docs
	@echo "The site starts at build/docs/index.html."

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "jcl needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group test --group lint
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist build
