#!/bin/bash
# Checkpoints on S3-compatible storage, with a server of the Python package `moto` on this machine: ranks killed between parts of an
# upload, before the manifest, storage that fails. Usage: tests/s3.sh [PROGRAM]: `rank`, built with the feature `burn-ddp-tests/s3`; it is
# built if not given. Needs python3 with venv, and PyPI for the first run: exit code 3 where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
if ! { python3 -m venv "$target/python" && "$target/python/bin/pip" install -q 'moto[server]==5.2.1'; }; then
  echo "needs python3 with venv, and the package moto" >&2
  exit 3
fi
[ -n "${1:-}" ] || cargo build --features burn-ddp-tests/s3 --bin rank
"$target/python/bin/python" tests/s3.py "${1:-$target/debug/rank}"
