# `make demo` and `make test` each do everything on a fresh machine: make .venv, install the project into it with the
# versions pinned in constraints.txt, and run. Nothing is written outside this folder. Run again, they start at once.

.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
DEMO_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
EXTRAS := all,interop,dev,docs
BARE := torchtitan spmd_types

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_REQUIRE_VIRTUALENV = 1
export PIP_CACHE_DIR ?= $(CURDIR)/$(VENV)/.cache/pip
export KERAS_HOME = $(CURDIR)/$(VENV)/.keras
export NO_MKDOCS_2_WARNING = 1
export KERAS_BACKEND = tensorflow
export TF_CPP_MIN_LOG_LEVEL = 2
export JAX_PLATFORMS ?= cpu

# An interpreter that was asked for by name is held to; otherwise an environment that is there already is kept.
ifeq ($(origin PYTHON),file)
PYTHON_ASKED :=
else
PYTHON_ASKED := 1
endif

# Python 3.11 is the oldest supported. There is no upper bound here: pip says which framework has no build for it.
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))

.PHONY: help demo test lint format docs install clean

help:  ## what can be made
	@echo "usage: make [PYTHON=python3.11] TARGET"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON chooses the interpreter (3.11 or newer) that .venv is made with; now: $(PYTHON)."
	@echo "WORKERS is how many processes share the tests (now: $(WORKERS))."
	@echo "PYTEST_ARGS goes to pytest: make test PYTEST_ARGS='tests/core -x'; DEMO_ARGS to the demo."

demo: install  ## train the same models in all three frameworks from one precision.toml, and compare
	@$(BIN)/precision demo --config examples/precision.toml $(DEMO_ARGS)

test: install  ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: install  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## let ruff mend what it can
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: install  ## build the documentation into site/, warnings being errors
	$(BIN)/mkdocs build --strict

# What is installed is told by contents, not by times: a fresh checkout or a touched file installs nothing again.
# .venv/.python names the interpreter and the folder, .venv/.installed what was installed with it.
install:  ## make .venv and install the project into it, if that is not done yet
	@set -e; \
	inputs="$$(cat pyproject.toml constraints.txt precision/_version.py; ls -d backends/*/; echo '$(EXTRAS)')"; \
	inputs="$$(printf '%s' "$$inputs" | cksum)"; \
	made="$$(cat $(VENV)/.python 2>/dev/null || true)"; \
	if [ -n "$$made" ] && [ -z "$(PYTHON_ASKED)" ] && $(BIN)/python -c '' 2>/dev/null \
	   && [ "$${made#*|}" = "$(CURDIR)" ]; then \
	  here="$$made"; \
	else \
	  if ! command -v "$(PYTHON)" >/dev/null 2>&1 || ! "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null; then \
	    have="$$("$(PYTHON)" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true)"; \
	    if [ -n "$$have" ]; then echo "$(PYTHON) is Python $$have; precision needs Python 3.11 or newer." >&2; \
	    else echo "$(PYTHON) is not a Python that runs; precision needs Python 3.11 or newer." >&2; fi; \
	    for other in python3.13 python3.12 python3.11; do \
	      if "$$other" -c '$(SUPPORTED)' >/dev/null 2>&1; then \
	        echo "There is a $$other here: make PYTHON=$$other $(MAKECMDGOALS)" >&2; exit 1; \
	      fi; \
	    done; \
	    echo "Install one, or name one that is not on the PATH: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	  fi; \
	  here="$$("$(PYTHON)" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')|$(CURDIR)"; \
	fi; \
	if [ "$$here" = "$$made" ] && [ "$$inputs" = "$$(cat $(VENV)/.installed 2>/dev/null)" ]; then exit 0; fi; \
	if [ "$$here" != "$$made" ] || ! $(BIN)/python -c '' 2>/dev/null; then \
	  echo "Making $(VENV) with Python $${here%|*}"; \
	  rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); printf '%s' "$$here" > $(VENV)/.python; \
	  echo "Installing precision[$(EXTRAS)] into $(VENV); this once it takes some minutes"; quiet=; \
	else \
	  echo "Bringing $(VENV) up to date"; quiet=--quiet; \
	fi; \
	rm -f $(VENV)/.installed; \
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel; \
	$(BIN)/python -m pip install $$quiet -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'; \
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps $(BARE); \
	printf '%s' "$$inputs" > $(VENV)/.installed

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist site *.egg-info backends/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
