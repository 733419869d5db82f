# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= out
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test lint bench attack docs clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.installed-app  ## run a whole market on bundled data and write an HTML report
	$(BIN)/flmarket demo --out $(OUT)/demo

test: lint  ## everything CI checks: style, types, layering, tests
	@sh tools/browser.sh
	$(BIN)/python -m pytest -n auto -q

lint: $(VENV)/.installed-dev  ## style, types and the direction of imports
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed-dev  ## speed against named peers, measured in the same run
	$(BIN)/python -m benchmarks

attack: $(VENV)/.installed-dev  ## the long attacks on guard and broker (an hour or two); `make test` runs short ones
	FLMARKET_HOSTILE_MESSAGES=10000 $(BIN)/python -m pytest -q tests/attacks/test_hostile_server.py
	$(BIN)/python tests/attacks/broker_chaos.py --kills 500 --faults 200 --database sqlite --seed 1
	$(BIN)/python tests/attacks/broker_chaos.py --kills 500 --faults 200 --database postgres --seed 1

docs: $(VENV)/.installed-docs  ## the documentation as a site, in out/site; needs no network to build or to read
	$(BIN)/python -m mkdocs build --strict --quiet --site-dir $(OUT)/site

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(OUT)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "flmarket needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Creating $(VENV) …"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing flmarket[$*] into $(VENV) (a minute or two the first time) …"
	@$(PIP) install --constraint constraints.txt --editable '.[$*]'
	@touch $@
