#!/bin/bash
# Files for other programs, read back by those programs' Python packages. Needs python3 with venv, and PyPI for the first run.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo test --test formats
python3 -m venv "$target/python"
"$target/python/bin/pip" install -q safetensors==0.8.0 numpy tensorboard==2.21.0
"$target/python/bin/python" tests/formats.py "$target/tmp/formats"
