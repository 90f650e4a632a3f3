"""The examples of the crate `kernels/gpu`, as `cargo test` compiles them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "checked" / "examples"
MICRO = EXAMPLES / "gpu_micro"
TRANSLATE = EXAMPLES / "translate"

needs_examples = pytest.mark.skipif(
    not (MICRO.exists() and TRANSLATE.exists()), reason="`make test-gpu` builds the program that it runs"
)
