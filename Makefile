SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

STAGES ?= 2
ARGS ?=
FAULTS ?= 100
READY := .venv/.ready
BIN := .venv/bin

EXPERIMENTS := $(addprefix experiment-,speed memory accuracy ablation prediction plan recording)

.PHONY: help setup demo test test-faults test-gpu soak bench bench-gpu reference check format wheel clean $(EXPERIMENTS)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything pinned, rpcpipe editable

$(READY): pyproject.toml constraints.txt
	python3 -m venv .venv
	$(BIN)/pip install -e ".[test,dev,examples,notebook,plot,safetensors,bench]" -c constraints.txt
	touch $@

demo: $(READY) ## train a small GPT on STAGES (2) processes; ARGS go to the script
	$(BIN)/python examples/train_gpt.py --stages $(STAGES) $(ARGS)

test: $(READY) ## run the tests; ARGS go to pytest
	$(BIN)/python -m pytest $(ARGS)

test-faults: $(READY) ## every failure in every phase, and FAULTS (100) random ones; some 30 minutes
	RPCPIPE_FAULTS=$(FAULTS) $(BIN)/python -m pytest tests/test_faults.py $(ARGS)

soak: $(READY) ## 10,000 steps while memory, files, threads, RRefs and contexts are sampled
	$(BIN)/python -m benchmarks.soak $(ARGS)

test-gpu: $(READY) ## run the tests that need a GPU
	$(BIN)/python -m pytest -m cuda $(ARGS)

bench: $(READY) ## measure against the machine's limit and the peers; ARGS="--quick --only hop,limit"
	$(BIN)/python -m benchmarks.bench $(ARGS)

bench-gpu: $(READY) ## the same on GPUs: step time beside the limit, by CUDA events
	$(BIN)/python -m benchmarks.gpu $(ARGS)

experiment-speed: ## throughput by stages and micro-batches, next to the papers'
experiment-memory: ## the largest model for a memory limit in each stage
experiment-accuracy: ## the same ResNet with and without a pipe, over three seeds
experiment-ablation: ## each component switched off alone
experiment-prediction: ## how busy predict keeps the slowest stage
experiment-plan: ## predicted step time and memory beside the measured
experiment-recording: ## what a step takes more when it is recorded
$(EXPERIMENTS): $(READY)
	$(BIN)/python -m benchmarks.$(@:experiment-%=%) $(ARGS)

reference: $(READY) ## write docs/api.md from the docstrings
	$(BIN)/python docs/make_api.py

check: $(READY) ## formatting, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --strict rpcpipe

format: $(READY) ## format, and fix what lint can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

wheel: ## build the wheel, install it into an empty venv, train two stages with it
	.ci/wheel-smoke

clean: ## remove all that the other targets made
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
