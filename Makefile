# make demo | test | lint | bench | clean.  PYTHON chooses the interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench clean

demo: $(INSTALLED)
	$(BIN)/fastattn demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(INSTALLED)
	$(BIN)/fastattn bench

clean:
	rm -rf $(VENV) build dist *.egg-info fastattn/*.so .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Editable, and without the native module: tests and demo compile it on first use, and again after a change in csrc/.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "fastattn needs Python 3.10 or newer, and $(PYTHON) is not one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	    { echo "$(PYTHON) cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing fastattn and its tools into $(VENV) (torch alone is 200 MB to 3 GB; once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
