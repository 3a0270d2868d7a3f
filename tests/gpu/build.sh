#!/usr/bin/env bash
# Builds what `run.sh` runs on a machine with NVIDIA GPUs, which needs no Rust: `tests/gpu/build.sh DIR`, then copy DIR there. More
# features may follow, such as burn-ddp-tests/nvrtc. CubeCL downloads an LLVM while it is built.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 DIR [FEATURE...]" >&2; exit 2; }
cd "$(dirname "$0")/../.."
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
features="burn-ddp-tests/nccl burn-ddp-bench/nccl burn-ddp-examples/nccl $*"
cargo build --release --locked --features "$features" --bins --example nccl_check
for program in burnrun burn-ddp-bench mnist resnet rank examples/nccl_check; do
  cp "target/release/$program" "$dir/"
done
# The suites look for the program `rank` where it was built.
echo "$PWD/target/release/rank" >"$dir/rank.path"
cargo test --release --locked --features "$features" --test gradients --test awkward --test models --test mixed --no-run --message-format json |
  python3 -c '
import json, shutil, sys
for line in sys.stdin:
    made = json.loads(line)
    if made.get("executable") and "test" in made.get("target", {}).get("kind", []):
        shutil.copy(made["executable"], sys.argv[1] + "/test-" + made["target"]["name"])
' "$dir"
cp tests/gpu/run.sh "$dir/"
du -sh "$dir"
