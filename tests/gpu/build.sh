#!/usr/bin/env bash
# Builds what `run.sh` runs on a machine with NVIDIA GPUs, which needs no Rust: `tests/gpu/build.sh DIR`, then copy DIR there.
# CubeCL downloads an LLVM while it is built.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
cd "$(dirname "$0")/../.."
mkdir -p "$1"
dir=$(cd "$1" && pwd)
features="burn-ddp-tests/nccl,burn-ddp-bench/nccl,burn-ddp-examples/nccl"
cargo build --release --locked -p burn-ddp-launch -p burn-ddp-bench -p burn-ddp-examples -p burn-ddp-tests --features "$features" --bins
cargo build --release --locked -p burn-ddp-nccl --example nccl_check
for program in burnrun burn-ddp-bench mnist resnet rank examples/nccl_check; do
  cp "target/release/$program" "$dir/"
done
# The suites look for the program `rank` where it was built.
echo "$PWD/target/release/rank" >"$dir/rank.path"
cargo test --release --locked -p burn-ddp-tests --features nccl --test gradients --test awkward --test models --test mixed --no-run --message-format json |
  python3 -c '
import json, shutil, sys
for line in sys.stdin:
    made = json.loads(line)
    if made.get("executable") and "test" in made.get("target", {}).get("kind", []):
        shutil.copy(made["executable"], sys.argv[1] + "/test-" + made["target"]["name"])
' "$dir"
cp tests/gpu/run.sh "$dir/"
du -sh "$dir"
