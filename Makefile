# `make help` lists the targets. Variables: CONFIG (recipe), ARGS (passed on), PLATFORM (auto|cpu|cuda), SUITE.
CONFIG ?= grpo_sum_digits_tiny
PLATFORM ?= auto
ARGS ?=
SUITE ?= cpu
PY := .venv/bin/python
# Two test files at a time, each in one process: their meshes and engines are shared within a file.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder

ifneq ($(filter cpu cuda,$(PLATFORM)),)
export TORCHTITAN_RL_PLATFORM := $(PLATFORM)
endif

.DEFAULT_GOAL := help
.PHONY: help install model train test docs bench integration format clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: ## Make .venv with everything needed; does nothing when it is up to date.
	@scripts/install.sh "$(PLATFORM)"

# `exec`: no shell is left between make and python.
train: install ## Train: make train CONFIG=<recipe> ARGS='--steps 20'
	@exec $(PY) -m torchtitan_rl.train --config $(CONFIG) $(ARGS)

model: install ## Make SmolLM2-135M-Instruct, a small real model, in outputs/models; fetches 90 MB once.
	@exec $(PY) -m torchtitan_rl.models.makers.smollm2 $(ARGS)

test: install ## Lint, format check, type check, tests and docs: make test ARGS='-k name'
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@scripts/browser.sh
	@$(PY) -m mypy & types=$$!; $(PY) -m pytest $(PARALLEL) $(ARGS); tests=$$?; \
	wait $$types || { echo "error: mypy has found something, see above"; exit 1; }; exit $$tests

docs: install ## Build the pages of docs/; warnings are errors, as in `make test`.
	@$(PY) docs/_ext/generated.py
	@$(PY) -m sphinx -q -W --keep-going -n -b html docs outputs/docs
	@echo "open $(CURDIR)/outputs/docs/index.html"

bench: install ## Run every benchmark.
	@exec $(PY) benchmarks/run_all.py $(ARGS)

integration: install ## Run the integration suite on the CPU, or SUITE=launchers; results go to outputs/integration.
	@[ "$(SUITE)" != launchers ] || scripts/cluster_tools.sh
	@exec $(PY) integration_tests.py outputs/integration --test_suite $(SUITE) --test_name all --ngpu 0 $(ARGS)

format: install ## Sort imports, fix what ruff can fix, format; write what docs/ has from the code.
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(PY) docs/_ext/generated.py

clean: ## Remove caches; keeps outputs and .venv.
	@find . \( -path ./.venv -o -path ./outputs -o -path ./.git \) -prune -o -type d -name __pycache__ -exec rm -rf {} +
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build
