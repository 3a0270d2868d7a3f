#!/bin/bash
# Files for other programs, read back by those programs' Python packages. Needs python3 with venv, and PyPI for the first run: exit
# code 3 where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
if ! { python3 -m venv "$target/python" && "$target/python/bin/pip" install -q safetensors==0.8.0 numpy tensorboard==2.21.0; }; then
  echo "needs python3 with venv, and the packages safetensors, numpy and tensorboard" >&2
  exit 3
fi
cargo test --test exported_files
"$target/python/bin/python" tests/exported_files.py "$target/tmp/exported_files"
