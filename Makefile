# `make demo` and `make test` do all that is needed before; the rest is for working on Tandem itself.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-rust test-python fuzz lint format bench bench-lazy bench-scaling wheel clean

env := source scripts/env.sh &&

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

setup: ## the virtual environment and the crates
	@scripts/setup.sh

build: setup ## compile and install the package, editable, into the virtual environment
	@$(env) PIP_QUIET=1 maturin develop --release --locked

demo: build ## an unchanged training script, with and without Tandem
	@$(env) python examples/demo.py

test: test-rust test-python ## all tests

test-rust: setup ## the crates that need no torch
	@$(env) cargo test --workspace --exclude tandem-pybridge --locked --quiet

test-python: build ## the package; ARGS="-k name" goes to pytest
	@$(env) pytest tests/python -q $(ARGS)

fuzz: build ## 2,000 random programs, eagerly and in each mode; ARGS="--seed 7" goes to it
	@$(env) python -m tests.fuzz --programs 2000 $(ARGS)

lint: setup ## formatting and static checks
	@cargo fmt --all --check
	@$(env) cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
	@$(env) ruff check --quiet
	@$(env) ruff format --check --quiet

format: setup ## format and fix in place
	@cargo fmt --all
	@$(env) ruff check --fix --quiet
	@$(env) ruff format --quiet

bench: build ## the suite of programs: eager, torch.compile, Tandem; ARGS goes to it
	@$(env) python benches/run.py $(ARGS)

bench-lazy: build ## lazy evaluation against co-execution
	@$(env) python benches/lazy.py $(ARGS)

bench-scaling: build ## the cost of an op in long programs and with many paths
	@$(env) python benches/scaling.py $(ARGS)

wheel: ## dist/*.whl for one torch: make wheel TORCH=2.14.0
	@scripts/wheel.sh

clean: ## what was built; the virtual environment stays
	@$(env) cargo clean --quiet
	@rm -rf dist pybridge/python/torch_tandem/_core*.so pybridge/python/torch_tandem/_built_for.py
