# Entry points of development; `make` alone lists them.
#
# The environment is .venv, or .venv-3.12 with PYTHON=python3.12, so that each interpreter has its own; VENV=... selects
# another directory. It is set up when first needed, and again when setup.py, constraints.txt, the interpreter or the path of
# the checkout changes. A set-up that did not finish is repeated from the start.

CANDIDATES := $(or $(PYTHON),python3 python3.12 python3.11 python3.13 python3.14)
# The first candidate that runs and is new enough: its version, a key of the interpreter and the checkout, and its path.
# In an active environment these describe the base interpreter, so that an active .venv is neither replaced nor used as its
# own base.
IDENTIFY := import hashlib, os, sys; assert sys.version_info >= (3, 11); \
	key = hashlib.sha256(repr((sys.version, os.path.realpath(sys.base_prefix), os.getcwd())).encode()).hexdigest()[:12]; \
	print("%d.%d %s %s" % (*sys.version_info[:2], key, getattr(sys, "_base_executable", "") or sys.executable))
FOUND := $(shell for python in $(CANDIDATES); do \
	identity=$$($$python -c '$(IDENTIFY)' 2>/dev/null) && echo $$identity && break; done)
VENV ?= .venv$(if $(PYTHON),-$(word 1,$(FOUND)))
BIN := $(VENV)/bin
MADE := $(VENV)/.hpnlp-made-$(word 2,$(FOUND))
UNFINISHED := $(VENV)/.hpnlp-unfinished

WORKDIR ?= runs/bytes
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal

help:
	@echo 'make demo       set up, train a byte-level language model for some minutes, to $$WORKDIR ($(WORKDIR)), and add an index'
	@echo 'make test       set up, and run the tests'
	@echo 'make test-all   run the tests that `make test` excludes: oracles (torch, transformers), slow tests, notebooks'
	@echo 'make lint       check format and style      make format     format, and fix style errors'
	@echo 'make types      check types                 make contracts  check the imports between packages'
	@echo 'make docs       build the documentation into site/; warnings are errors'
	@echo 'make notebooks  execute the notebooks and store their outputs'
	@echo 'make results    generate tables and plots of the documentation from experiments/results/'
	@echo 'make constraints  update constraints.txt, the versions that the tests run with (needs python3.11 and python3.12)'
	@echo 'make clean      remove environments and caches, but no runs'
	@echo
	@echo 'PYTHON=python3.12 uses that interpreter and .venv-3.12. ARGS="..." is passed to the command, MIX="..." to the second of demo.'
	@echo 'On Linux, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu avoids the CUDA build of torch in test-all.'

demo: $(MADE)-runtime
	$(BIN)/hpnlp train --config=lm/bytes --workdir=$(WORKDIR) $(ARGS)
	$(BIN)/hpnlp mix $(WORKDIR) $(MIX)

test: $(MADE)-test
	$(PYTEST) $(ARGS)

test-all: $(MADE)-dev
	$(PYTEST) -m "oracle or slow or notebook" $(ARGS)

lint: $(MADE)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(MADE)-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(MADE)-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(MADE)-dev
	$(BIN)/lint-imports --no-logo

docs: $(MADE)-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)

notebooks: $(MADE)-dev
	$(BIN)/python .ci/notebooks.py
	$(BIN)/jupyter nbconvert --to notebook --inplace --execute --ExecutePreprocessor.timeout=3600 \
		--ExecutePreprocessor.record_timing=False colabs/*.ipynb

results: $(MADE)-runtime
	$(BIN)/python experiments/bench/results.py
	$(BIN)/python docs/code_map.py

constraints:
	python3.11 .ci/constraints.py python3.11 python3.12

clean:
	rm -rf .venv .venv-* build site .cache *.egg-info .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Stamp files of installed extras, named after the interpreter and this directory; each extra includes the previous one.
$(MADE)-runtime: setup.py constraints.txt | python
	$(call install,.,runtime)
$(MADE)-test: setup.py constraints.txt | python
	$(call install,.[test],runtime test)
$(MADE)-dev: setup.py constraints.txt | python
	$(call install,.[dev],runtime test dev)

# No bytecode is compiled here: most installed modules are never imported, and compiling them takes half a minute.
pip = $(BIN)/python -I -m pip install $(1) --disable-pip-version-check --no-compile \
	--constraint constraints.txt --editable '$(2)'

define install
	@if [ -e $(VENV) ] && ! ls $(VENV)/.hpnlp-* >/dev/null 2>&1; then \
		echo "$(VENV) was not made by this Makefile: move it away, or choose another directory with VENV=..."; exit 1; fi
	@echo "Setting up $(VENV) for $(lastword $(2)). This happens once and takes a minute or two."
	@if [ ! -e $(MADE) ] || [ -e $(UNFINISHED) ]; then \
		rm -rf $(VENV) && mkdir -p $(VENV) && touch $(UNFINISHED) && '$(wordlist 3,99,$(FOUND))' -m venv $(VENV) && touch $(MADE); fi
	@touch $(UNFINISHED)
	@$(call pip,-qq,$(1)) || { echo 'The installation failed. Repeating it with the full output of pip:'; $(call pip,,$(1)); }
	@touch $(foreach level,$(2),$(MADE)-$(level)) && rm $(UNFINISHED)
endef

python:
	@test -n "$(FOUND)" || { echo "Found no working Python 3.11 or later among: $(CANDIDATES)."; \
		echo "Install one, or name yours: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }

# Packages are installed without bytecode (above). The first import must write it, or every process would compile jax again.
export PYTHONDONTWRITEBYTECODE :=

# Targets share one environment, in which pip must not run twice at the same time.
.NOTPARALLEL:
.PHONY: help demo test test-all lint format types contracts constraints docs notebooks results clean python
