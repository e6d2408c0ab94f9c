# The commands of a developer. Each makes .venv when it is missing, and brings it up to date when
# pyproject.toml changed: a stamp file, written last, says what was installed completely.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs clean
.NOTPARALLEL: # two installs into one environment would tread on each other
.DELETE_ON_ERROR:

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: $(VENV)/.installed ## train on 4 hosts, kill a worker and the leader's host, show how training resumes
	$(BIN)/resilient-jax demo

# One after the other, about an hour and a half on two idle cores: `make bench BENCHMARKS=erasure` runs one of them.
BENCHMARKS ?= stall step erasure snapshot plan decide resilience control hybrid detect
bench: $(VENV)/.installed-dev ## measure; each benchmark prints tables and a line of JSON
	for name in $(BENCHMARKS); do $(BIN)/python tests/benchmarks $$name || exit 1; done

# Of processes and jobs two at a time: they wait (for leases, deadlines, a worker that comes back) about as long as they
# compute. A file shares what it set up, such as the job that its tests break; all e2e tests share a compilation cache,
# and the undisturbed runs that jobs are compared with.
# The longest files come first (LONGEST_FIRST in each conftest.py), so that all cores end together.
# Python keeps the bytecode it compiles, because a test starts many processes.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-dev ## all tests: unit, process, e2e
	$(BIN)/python -m pytest tests/unit -n auto --dist loadfile --no-loadscope-reorder --durations 10
	$(BIN)/python -m pytest tests/process -n 2 --dist loadfile --no-loadscope-reorder --durations 10
	$(BIN)/python -m pytest tests/e2e -n 2 --dist loadfile --no-loadscope-reorder --durations 10

check: $(VENV)/.installed-dev ## formatting, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

docs: $(VENV)/.installed-docs ## build the pages into docs/_build, warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build

clean: ## remove the environment, caches and run folders
	rm -rf $(VENV) build dist docs/_build runs *.egg-info .pytest_cache .ruff_cache .hypothesis
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
