# Each target installs what it needs into $(VENV), from PyPI, when it is first asked for and
# again when pyproject.toml or constraints.txt change. Only Python 3.11 or newer and make have to be
# installed.

# The newest and the oldest installed Python that pyproject.toml declares. A shim of pyenv fails
# for a Python that is not active, so its folders are searched as well.
MINORS = $(shell sed -n 's/.*:: Python :: 3\.\([0-9]*\)".*/\1/p' pyproject.toml | sort -n $(1))
PYENV = $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
NAMES = $(foreach minor,$(1),python3.$(minor) $(wildcard $(PYENV)/3.$(minor).*/bin/python))
FIRST = $(shell for python in $(NAMES); do "$$python" -c "" 2> /dev/null && echo "$$python" && break; done)
PYTHON ?= $(or $(call FIRST,$(call MINORS,-r)),python3)
OLDEST ?= $(or $(call FIRST,$(call MINORS)),python3)
VENV ?= .venv
BIN := $(VENV)/bin
# The releases of JAX and its kin; none for the newest.
CONSTRAINTS ?= constraints.txt
# For example: make test PYTEST_ARGS="-k shard_map"
PYTEST_ARGS ?=
BENCH_ARGS ?=

# Without bytecode each process compiles JAX again, for 3 seconds; pip writes none (--no-compile).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Two installs into one environment at the same time would break it.
.NOTPARALLEL:
.PHONY: help install demo test test-all coverage test-python test-guard test-modes test-oldest
.PHONY: test-matrix install-oldest test-debian test-tpu asan lint types docs links package wheels check
.PHONY: nightly release-check bench models clean

LIST = awk -F ':.*\#\# ' '/^[a-z-]+:.*\#\# / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
help:  ## show this list
	@echo "Most changes need three commands:"
	@$(LIST) | grep -E "^make (demo|test|check) "
	@echo "All others:"
	@$(LIST) | grep -vE "^make (demo|test|check) "

# Once for all gates takes a third of the time of one target after the other.
install: $(VENV)/.installed-demo,docs,lint,matrix,package,tests  ## install what all gates need

demo: $(VENV)/.installed-demo  ## train a small sharded model and show its shardings
	$(BIN)/python examples/demo.py

PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# All tests take hours. How long a case and a test function may take: see tests/schedule.py.
MERGE := --seconds-per-case 0.1 --seconds-per-test 2
WIDER := --seconds-per-case 1 --seconds-per-test 10
NIGHT := --seconds-per-test 100
DRAW ?= $(MERGE)
test: $(VENV)/.installed-tests  ## run all quick tests, with the examples in the docs, and some of the others
	$(PYTEST) $(DRAW) $(PYTEST_ARGS)

test-all: $(VENV)/.installed-tests  ## run all tests, of large grids many cases, with optimized programs
	HYPOTHESIS_PROFILE=nightly JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(PYTEST) $(NIGHT) \
	  $(NNX_SHARDING_TEST_SEED:%=--hypothesis-seed=%) $(PYTEST_ARGS)

coverage: $(VENV)/.installed-tests  ## run most tests, and show which lines and branches they miss
	$(PYTEST) $(WIDER) --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

# Only the walk differs, so these are the tests that it can break.
WALK_TESTS := guard graph_faults life memory modes references statics
test-python: $(VENV)/.installed-tests  ## run the tests of the walk without the C extension
	NNX_SHARDING_PURE_PYTHON=1 $(PYTEST) $(DRAW) $(PYTEST_ARGS) \
	  $(WALK_TESTS:%=tests/test_%.py)

test-guard: $(VENV)/.installed-tests  ## compare guarded calls with fresh ones, for 10,000 steps
	NNX_SHARDING_GUARD_STEPS=all $(PYTEST) $(PYTEST_ARGS) \
	  tests/test_guard_machine.py tests/test_static_rules.py

# Addresses are not reused there, which one test waits for.
SANITIZERS := -fsanitize=address,undefined -fno-omit-frame-pointer -g -O1
ASAN_TESTS := tests/test_guard.py tests/test_guarded_calls.py tests/test_static_rules.py
asan: $(VENV)/.installed-tests  ## run the tests of the C extension under AddressSanitizer and UBSan
	rm -rf build/asan
	CC=gcc CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" \
	  $(BIN)/python -m pip install --quiet --no-deps --target build/asan .
	ls build/asan/nnx_sharding/core/guard/_native.*
	ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1 PYTHONMALLOC=malloc \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  PYTHONPATH=build/asan $(BIN)/pytest -p no:xdist $(PYTEST_ARGS) $(ASAN_TESTS) \
	  --deselect tests/test_guard.py::TestChanges::test_new_object_with_the_id_of_the_old_one

# What a Python or a release of JAX or Flax may break: calls, states and specs.
CORE := arguments checkpoint_processes compat custom_derivatives grad guard
CORE += hijax life modes references shard_map stages state_sharding strategies
CORE_TESTS := $(CORE:%=tests/test_%.py)

# Options of Flax change graphs, those of JAX change numbers.
GRAPHS := arguments composition guard modes references shard_map state_sharding statics
GRAPHS += custom_derivatives grad vjp vmap_and_scan remat stack accumulation
NUMBERS := arguments plain_jax ring shardings stages
MODES := NNX_GRAPH_MODE=0 NNX_GRAPH_UPDATES=0 JAX_ENABLE_X64=1 JAX_NUMPY_RANK_PROMOTION=raise
# A merge is tested with tree mode only: it replaces the walk through the graph, what is written back
# and the checks of both. The others replace one of these, or numbers. `make nightly` has all.
test-modes: $(VENV)/.installed-tests  ## run the core tests with other options of JAX and Flax
	@failed=; for mode in $(MODES); do echo "== $$mode"; \
	  case $$mode in NNX*) tests="$(GRAPHS)";; *) tests="$(NUMBERS)";; esac; \
	  env $$mode $(PYTEST) $(DRAW) $(PYTEST_ARGS) $$(printf 'tests/test_%s.py ' $$tests) || \
	    failed="$$failed $$mode"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

# The recorded programs are compiled again, in an environment of its own: the compiler takes 150 MB.
# JAX cannot load programs for topologies from its compilation cache.
TPU_VENV := $(VENV)-tpu
test-tpu:  ## compile for TPUs with their real compiler, which needs none, and test that
	$(MAKE) VENV=$(TPU_VENV) $(TPU_VENV)/.installed-tests,tpu
	JAX_ENABLE_COMPILATION_CACHE=0 NNX_SHARDING_TPU_COMPILER=1 $(TPU_VENV)/bin/python -m pytest $(PYTEST_ARGS) \
	  tests/test_tpu_programs.py tests/test_topologies.py

NOX_OLDEST = $(BIN)/nox --force-python $(OLDEST) --session "tests(oldest)"
install-oldest: $(VENV)/.installed-matrix
	$(NOX_OLDEST) --install-only

test-oldest: $(VENV)/.installed-matrix  ## run the core tests with the oldest Python, jax and flax
	$(NOX_OLDEST) -- $(DRAW) $(PYTEST_ARGS) $(CORE_TESTS)

# For a Python that is not installed, such as the newest.
test-debian:  ## run the tests on the Python of Debian sid, in a chroot (as root, with debootstrap)
	tools/test_on_debian.sh $(WIDER) $(PYTEST_ARGS)

# All tests with the newest releases of all, which constraints.txt may not have yet, and with the
# oldest of all; on the Pythons between them the core, which is what reads the interpreter.
NOX_NEWEST = $(BIN)/nox --force-python $(PYTHON) --session "tests(newest)"
test-matrix: $(VENV)/.installed-matrix  ## run the tests with oldest and newest jax, the core on each Python
	@failed=; \
	  $(BIN)/nox --session tests -- $(WIDER) $(PYTEST_ARGS) $(CORE_TESTS) || failed="$$failed core"; \
	  $(NOX_NEWEST) -- $(WIDER) $(PYTEST_ARGS) || failed="$$failed newest"; \
	  $(NOX_OLDEST) -- $(WIDER) $(PYTEST_ARGS) || failed="$$failed oldest"; \
	  [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

lint: $(VENV)/.installed-lint  ## check style, formatting, and that measured figures are those of a run
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/draw_performance.py --check

types: $(VENV)/.installed-lint $(VENV)/.installed-demo  ## check types
	$(BIN)/mypy

docs: $(VENV)/.installed-docs $(VENV)/.installed-tests  ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	$(BIN)/python tools/check_site.py docs/_build/html

links: $(VENV)/.installed-docs $(VENV)/.installed-tests  ## check the links to other sites
	$(BIN)/python -m sphinx -b linkcheck --quiet docs docs/_build/links

package: $(VENV)/.installed-package  ## build sdist and wheel, and try them in an empty environment
	PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) $(BIN)/python tools/try_package.py

wheels: $(VENV)/.installed-wheels  ## build wheels for this platform (on Linux in containers)
	$(BIN)/python -m cibuildwheel --output-dir dist

check:  ## run all gates, which have to pass before a merge, and report the time of each
	.ci/run

# The gates and what they leave out: all tests, their coverage, random walks at full length, the other
# modes, all Pythons, oldest and newest releases, the TPU compiler, sanitizers, some public models.
# Goes on after a failure, so that one night shows all of them. What a night draws is new each time.
nightly:  ## run everything, of large grids a sample, and report the time of each part
	.ci/run nightly

release-check:  ## check a commit before its release: the gates, the last nightly run, versions, README
	$(PYTHON) tools/check_release.py

bench: $(VENV)/.installed-bench  ## run the benchmarks
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Public packages, in an environment of their own. Others are read from folders with their sources:
# make models MODELS_ARGS="--path FOLDER"
MODELS_VENV := $(VENV)-models
MODELS_ARGS ?=
models:  ## measure public models, and write docs/models.md
	$(MAKE) VENV=$(MODELS_VENV) $(MODELS_VENV)/.installed-bench,models,tests,tpu
	$(MODELS_VENV)/bin/python -m pytest -n 0 -m "" tests/test_match_published.py -k "of_tunix or of_bonsai"
	$(MODELS_VENV)/bin/python -m benchmarks.public $(MODELS_ARGS)

clean:  ## delete everything that the other targets made, the environment included
	rm -rf $(VENV) $(TPU_VENV) $(MODELS_VENV) .nox .cache build dist docs/_build *.egg-info nnx_sharding/core/guard/_native.*.so
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage*
	find nnx_sharding tests docs benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "nnx_sharding needs Python 3.11 or newer, this is " + sys.version.split()[0] + \
	  ". Name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

comma := ,
$(VENV)/.installed-%: setup.py pyproject.toml $(CONSTRAINTS) $(wildcard nnx_sharding/core/guard/*.[ch]) | $(VENV)/.created
	@echo "Installing what \"$*\" needs into $(VENV): some minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  $(CONSTRAINTS:%=--constraint %) --editable '.[$*]'
	@touch $@ $(patsubst %,$(VENV)/.installed-%,$(subst $(comma), ,$*))
