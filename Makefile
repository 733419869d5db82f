# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= out
WORKERS = $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")  # a core is idle while a test waits
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test lint bench attack histories torture mutants flower-versions docs clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.installed-app  ## run a whole market on bundled data and write an HTML report
	$(BIN)/flmarket demo --out $(OUT)/demo

test: lint  ## everything CI checks: style, types, layering, tests
	@sh tools/browser.sh
	$(BIN)/python -m pytest -n $(WORKERS) -q

lint: $(VENV)/.installed-dev  ## style, types and the direction of imports
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed-dev  ## speed against named peers, measured in the same run
	$(BIN)/python -m benchmarks

attack: $(VENV)/.installed-dev  ## the long attacks on guard and broker (an hour or two); `make test` runs short ones
	FLMARKET_HOSTILE_MESSAGES=10000 $(BIN)/python -m pytest -q tests/attacks/test_hostile_server.py
	$(MAKE) histories SECONDS=1800

histories: $(VENV)/.installed-dev  ## services killed, paused and cut off on both databases, their histories judged (SECONDS=180, SEED=1)
	for database in sqlite postgres; do PYTHONPATH=tests/support $(BIN)/python -m histories \
	  --seconds $(or $(SECONDS),180) --seed $(or $(SEED),1) --database $$database || exit 1; done

flower-versions: $(VENV)/.installed-dev  ## the plug-in's tests on every Flower that it is for (a few minutes)
	for version in 1.38.0 1.39.0 1.40.0 1.41.0 1.42.0; do \
	  $(PIP) install --no-deps --upgrade --target $(OUT)/flwr-$$version flwr==$$version && \
	  PYTHONPATH=$(OUT)/flwr-$$version:src $(BIN)/python -m pytest -q -n 0 tests/flower/test_plugin.py || exit 1; done

torture: $(VENV)/.installed-dev  ## the simulator for an hour, from a fresh seed; HOURS=8 for a night
	$(BIN)/flmarket torture --hours $(or $(HOURS),1) --jobs 2

mutants: $(VENV)/.installed-dev  ## mutation testing of ledger, guard and privacy accounting (an hour or two; goes on where it was stopped)
	$(BIN)/python tools/mutants.py ledger guard privacy

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
