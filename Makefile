# The commands of a developer. Each makes .venv when it is missing, and brings it up to date when
# pyproject.toml changed: a stamp file, written last, says what was installed completely.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-jobs test-all check bench docs clean
.NOTPARALLEL: # two installs into one environment would tread on each other
.DELETE_ON_ERROR:

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: $(VENV)/.installed ## train on 4 hosts, kill a worker and the leader's host, show how training resumes
	$(BIN)/resilient-jax demo

# One after the other, about an hour and a half on two idle cores: `make bench BENCHMARKS=erasure` runs one of them.
BENCHMARKS ?= stall step erasure snapshot plan decide resilience control hybrid mesh detect
bench: $(VENV)/.installed-dev ## measure; each benchmark prints tables and a line of JSON
	for name in $(BENCHMARKS); do $(BIN)/python tests/benchmarks $$name || exit 1; done

# What each tier is, and where a new test goes: tests/README.md. Python keeps the bytecode it compiles, because a test
# starts many processes.
RUN := PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/run.py
test: $(VENV)/.installed-dev ## the tests, 12 minutes on two cores: no JAX, JAX, processes, four jobs
	$(RUN) --said-by "make $@" pure jax process smoke

test-jobs: $(VENV)/.installed-dev ## real jobs broken in each way, 26 minutes on two cores
	$(RUN) --said-by "make $@" jobs

test-all: $(VENV)/.installed-dev ## all of it: products, campaigns, etcd, hundreds of examples, wrong programs; hours
	$(RUN) --said-by "make $@" --full pure jax process smoke jobs benchmarks/tests
	$(BIN)/python tests/mutations.py

check: $(VENV)/.installed-dev ## formatting, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

docs: $(VENV)/.installed-docs ## build the pages into docs/_build, warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build

clean: ## remove the environment, caches and run folders
	rm -rf $(VENV) build dist docs/_build runs *.egg-info .pytest_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("resilient_jax needs Python 3.11 or \
	later, found " + sys.version.split()[0] + " as $(PYTHON). Say which to use: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.created
	$(INSTALL) -e '.[docs]'
	@touch $@
