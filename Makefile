# `make demo` and `make test` do all that is needed before; the rest is for working on Tandem itself.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build micro examples demo test test-rust test-python test-gpu conformance conformance-pytorch conformance-pytorch-gpu conformance-pytorch-files fuzz libraries lint format bench bench-operators bench-lazy bench-loading bench-memory bench-placement bench-scaling bench-shapes gpu-check wheel test-wheel clean

env := source scripts/env.sh &&

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

setup: ## the virtual environment and the crates
	@scripts/setup.sh

# What is measured is compiled as wheels are; what is tested has debug assertions, and features for which each crate is
# compiled once for all tests.
PROFILE := release
bench bench-operators bench-lazy bench-loading bench-memory bench-placement bench-scaling bench-shapes gpu-check libraries wheel: PROFILE := dist
lint test-rust test-python test-gpu examples conformance conformance-pytorch conformance-pytorch-gpu conformance-pytorch-files fuzz: PROFILE := checked
cargo_flags = --locked --profile $(PROFILE)$(if $(filter checked,$(PROFILE)), --features tandem-pybridge/tests)

build: setup ## compile and install the package, editable, into the virtual environment
	@$(env) step "package, compiled" maturin develop --uv --quiet $(cargo_flags)

demo: build ## an unchanged training script, with and without Tandem; TANDEM_DEVICE=gpu for the wgpu executor
	@$(env) python examples/demo.py

parts := test-rust test-python test-gpu

test: setup ## all tests; then the time of each part, and which tests were skipped
	@rm -rf target/outcomes && mkdir -p target/outcomes
	@$(env) export TANDEM_OUTCOMES=$$root/target/outcomes; \
	    for part in $(parts); do $(MAKE) --no-print-directory $$part; done; python -m tests.outcomes

test-rust: setup ## the crates that need no torch
	@$(env) step "Rust tests, compiled" cargo test --workspace $(cargo_flags) --quiet --no-run
	@$(env) step "Rust tests" cargo test --workspace $(cargo_flags) --quiet

# With PyTorch's kernels, whose bits are eager's; then what compares values with Tandem's own ones.
own_kernels = test_accuracy test_channels_last test_diverse test_fed test_flush_denormal test_hard_cases test_new_shapes test_opinfo test_own_kernels test_phases test_placement test_training

# In two processes. Threads that wait sleep, because the processes share the cores.
pytest_twice := env OMP_WAIT_POLICY=passive pytest -q -n 2 --maxfail 20 --dist loadscope --no-loadscope-reorder

test-python: build ## the package; ARGS="-k name" goes to pytest
	@$(env) export TANDEM_KERNELS=aten; step "Python tests" $(pytest_twice) tests/python $(ARGS)
	@$(env) export TANDEM_KERNELS=own; step "Python tests, own kernels" $(pytest_twice) $(own_kernels:%=tests/python/%.py) $(ARGS)

# As the adapter is; as the weakest one that WebGPU allows, a third of the cases; and without one feature at a time: of a
# sample, what uses it. Each of the two processes has one of the software adapter's threads.
gpu_profiles := all int64,f64,f16,int16,immediates,limits,spirv int64 f64 f16
gpu_sample := executor or conformance or pointwise or reduce or index

test-gpu: build examples ## the wgpu executor on any adapter, the software one included; ARGS="-k name"
	@$(env) for without in $(gpu_profiles); do \
	    case $$without in \
	        all) only=() ;; *,*) only=(--every 3) ;; *) only=(-k "$(gpu_sample)" --using $$without) ;; \
	    esac; \
	    export TANDEM_GPU_WITHOUT=$${without/all/} LP_NUM_THREADS=1; \
	    step "tests of the wgpu executor without $${without/all/nothing}" \
	        pytest tests/gpu -q -n 2 --dist worksteal "$${only[@]}" $(ARGS); \
	done

# Programs that the tests of the wgpu executor run. After `make test-rust` they are up to date.
examples: setup
	@$(env) cargo build --workspace --examples $(cargo_flags) --quiet

conformance: build ## PyTorch's operator samples on the wgpu executor: docs/conformance.md
	@$(env) python -m tests.conformance --write docs/conformance.md $(ARGS)

conformance-pytorch: build ## PyTorch's operators, modules and optimizers in all phases: docs/conformance-pytorch.md
	@$(env) python -m tests.pytorch --write docs/conformance-pytorch.md $(ARGS)

# Random numbers are drawn on the host, as eager CPU draws them.
conformance-pytorch-gpu: build ## other forms of calls, and changing numbers, on the wgpu executor; ARGS="-k name"
	@$(env) TANDEM_DEVICE=gpu TANDEM_ALLOW_SOFTWARE=1 TANDEM_GPU_WITHOUT=random \
	    python -m tests.pytorch --only variants,numbers $(ARGS)

# PyTorch's test files are fetched at the commit of this torch, unless SOURCE names a checkout.
conformance-pytorch-files: build ## PyTorch's own test files on this device; SOURCE=checkout, ARGS="-k name"
	@$(env) export TANDEM_PYTORCH_SOURCE=$$(python scripts/pytorch_tests.py $(if $(SOURCE),--source $(SOURCE))); \
	    python -m tests.pytorch --only files $(ARGS)

# At length: 20,000 programs each, with seeds of their own. `--without GROUPS` leaves out what is known to fail.
#   python -m tests.fuzz --programs 20000 --own
#   python -m tests.fuzz --programs 20000
#   python -m tests.fuzz --programs 20000 --modes lazy
#   python -m tests.fuzz --programs 20000 --runner beside --threads 2
#   python -m tests.fuzz.functions --programs 20000 --jobs 2
#   python -m tests.fuzz.functions --programs 20000 --jobs 2 --compile
fuzz: build ## 2,000 random programs, eagerly and in each mode, and 2,000 with functions; ARGS="--seed 7" goes to both
	@$(env) python -m tests.fuzz --programs 2000 $(ARGS)
	@$(env) python -m tests.fuzz.functions --programs 2000 $(ARGS)

# Their environments are in the cache; they share the torch of the project's.
libraries: build ## programs of other libraries beside eager: docs/libraries.md; ARGS="--only einops,timm" runs some
	@$(env) python -m tests.libraries $(if $(ARGS),$(ARGS),--write docs/libraries.md)

cpp := $(wildcard $(foreach folder,pybridge/cpp pybridge/cpp/*,$(folder)/*.cpp $(folder)/*.h))

lint: setup ## formatting and static checks
	@cargo fmt --all --check
	@$(env) step "clippy" cargo clippy --workspace --all-targets $(cargo_flags) --quiet -- -D warnings
	@$(env) export RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links"; step "rustdoc" cargo doc --workspace --no-deps --document-private-items $(cargo_flags) --quiet
	@$(env) step "dependencies" cargo deny --offline --log-level error check bans licenses sources
	@$(env) ruff check --quiet
	@$(env) ruff format --check --quiet
	@$(env) clang-format --dry-run --Werror $(cpp)
	@# The scripts of the report's page are one text.
	@$(env) mkdir -p target; cat pybridge/python/torch_tandem/_report/page/*.js > target/report.js; \
	    biome lint --error-on-warnings --log-level=error target/report.js

format: setup ## format and fix in place
	@cargo fmt --all
	@$(env) ruff check --fix --quiet
	@$(env) ruff format --quiet
	@$(env) clang-format -i $(cpp)

bench: build ## the suite of programs: eager, torch.compile, Tandem; ARGS goes to it
	@$(env) python benches/run.py $(ARGS)

bench-operators: build ## every operator of PyTorch's database in three sizes; ARGS="--only 'conv*'" measures some
	@$(env) python benches/operators.py $(ARGS)

bench-lazy: build ## lazy evaluation against co-execution
	@$(env) python benches/lazy.py $(ARGS)

bench-placement: build ## the choice of the thread that executes runs, alone and beside busy processes
	@$(env) python benches/placement.py $(ARGS)

bench-scaling: build ## the cost of an op in long programs and with many paths
	@$(env) python benches/scaling.py $(ARGS)

bench-shapes: build ## random chains of operators at random shapes; ARGS="--cases 5000 --seed 1"
	@$(env) python benches/shapes.py $(ARGS)

bench-loading: build ## with batches from data loading workers that compute
	@$(env) python benches/loading.py $(ARGS)

bench-memory: build ## tensors' and resident memory, beside eager
	@$(env) python benches/memory.py $(ARGS)

# The phases of the GPU check that need no torch.
micro:
	@$(env) cargo build --release --quiet --locked -p tandem-gpu --example gpu_micro

gpu-check: build micro ## what a GPU is, can do and how fast Tandem is on it: docs/gpu.md; ARGS=--help
	@$(env) python scripts/gpu_check.py $(ARGS)

wheel: ## the wheel and the source distribution in dist/; TORCH="2.14.0 2.15.0" restricts the wheel to these
	@CARGO_FLAGS="$(cargo_flags)" scripts/wheel.sh

test-wheel: ## the wheel in bare environments; PAIRS="2.15.0:3.13 ..." of torch and Python, or PAIRS=all
	@scripts/test_wheel.sh

clean: ## what was built; the virtual environment stays
	@$(env) cargo clean --quiet
	@rm -rf dist pybridge/python/torch_tandem/_core*.so pybridge/python/torch_tandem/_shim_torch*
