# Each target installs what it needs into $(VENV), from PyPI, when it is first asked for and
# again when setup.py changes. Only Python 3.11 or newer and make have to be there.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# For example: make test PYTEST_ARGS="-k shard_map"
PYTEST_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
# Two installs into one environment at the same time would break it.
.NOTPARALLEL:
.PHONY: help demo test test-python lint types docs check bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo  ## train a small sharded model and show where everything lives
	$(BIN)/python -m nnx_sharding.demo

test: $(VENV)/.installed-tests  ## run the tests, with the examples in docs and docstrings
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

test-python: $(VENV)/.installed-tests  ## run the tests without the C extension
	NNX_SHARDING_PURE_PYTHON=1 $(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint  ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-lint $(VENV)/.installed-demo  ## check types
	$(BIN)/mypy

docs: $(VENV)/.installed-docs  ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

check: lint types docs test test-python  ## all gates: what has to pass before a change is merged

bench: $(VENV)/.installed-bench  ## run the benchmarks
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:  ## delete everything that the other targets made, the environment included
	rm -rf $(VENV) build dist docs/_build *.egg-info nnx_sharding/lifting/_walk.*.so
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find nnx_sharding tests docs benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "nnx_sharding needs Python 3.11 or newer, this is " + sys.version.split()[0] + \
	  ". Name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: setup.py pyproject.toml nnx_sharding/lifting/_walk.c | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
