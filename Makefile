# What a newcomer and the build run. Everything happens in .venv, which is made when needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FLIGHTS ?= 20000
SETTINGS_PAGE := docs/settings.md
SEED ?= 1
DURATION ?= 300

# What the compatibility run uses: another environment, with the newest Python that is here (one of
# pyenv's need not be on the PATH) and an older SQLAlchemy, and a server of an older release.
COMPAT := .venv-compat
PYTHON_NEWEST ?= $(shell \
	for minor in 14 13 12; do \
		for python in python3.$$minor "$$HOME"/.pyenv/versions/3.$$minor.*/bin/python3.$$minor; do \
			"$$python" -c 'import venv, ensurepip' 2>/dev/null && echo "$$python" && exit; \
		done; \
	done; \
	echo $(PYTHON))
COMPAT_URL ?= postgresql+psycopg://postgres@127.0.0.1:5432/postgres
WHEEL := build/wheel

.PHONY: demo test lint docs compat cases-long property bench mutants mutants-python chaos wheel clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python -m examples.flights.demo --flights $(FLIGHTS)

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pages that are made from the code.
docs: $(STAMP)
	$(BIN)/python -c 'from sqlalchemy_relaybus.settings import as_markdown; \
		print(as_markdown(), end="")' > $(SETTINGS_PAGE)

# The suite on SQLAlchemy 2.0, PYTHON_NEWEST and the server at COMPAT_URL; without one it fails. Not
# the tests that mostly kill processes and wait for what becomes of it: make test has them.
KILLS := tests/cases tests/chaos tests/integration/test_demo.py
compat: $(COMPAT)/.installed
	TEST_DATABASE_URL=$(COMPAT_URL) $(COMPAT)/bin/python -m pytest $(KILLS:%=--ignore=%)

# The cases from the field at their full length.
cases-long: $(STAMP)
	$(BIN)/python -m pytest tests/cases -m long

# Random histories against the model of the bus, for ten minutes or more.
property: $(STAMP)
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/property -s

# How fast a backlog is drained here, and what that costs the database.
bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Each clause of each statement taken out in turn: do the tests notice? Goes on where it was ended.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# Likewise what is changed in the Python code of the pure modules, the session and the worker. Hours;
# MUTANTS='sqlalchemy_relaybus.session.*' for a part of them, SAMPLE=10 for one in ten.
mutants-python: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group mutation
	$(BIN)/python -m tests.mutants.python $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTANTS)

# Publishers and workers under kills, crashes and cuts; figures and problems in build/chaos.json.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --seed $(SEED) --duration $(DURATION) --json build/chaos.json

# What a user installs: the wheel in a clean environment, away from the checkout.
wheel: $(STAMP)
	rm -rf $(WHEEL)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL) .
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(WHEEL)/venv/bin/python -m pip install --quiet --disable-pip-version-check \
		"$$(echo $(WHEEL)/*.whl)[embedded,asyncio]" --group test
	mkdir $(WHEEL)/run && cp -r README.md Makefile pyproject.toml .ci tests docs $(WHEEL)/run
	cd $(WHEEL)/run && ../venv/bin/python -m pytest tests/test_readme.py tests/migrations

clean:
	rm -rf $(VENV) $(COMPAT) build dist mutants .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# pip before 25.1 knows no dependency groups
$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[postgresql,embedded,asyncio]' --group dev
	touch $@

$(COMPAT)/.installed: pyproject.toml
	$(PYTHON_NEWEST) -m venv --clear $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[postgresql,embedded,asyncio]' 'SQLAlchemy<2.1' --group test
	touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) is missing: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version):" \
			"make PYTHON=python3.12, for example" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "the Python modules venv and pip are missing: apt-get install python3-venv" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
