#!/usr/bin/env bash
# Packs what `run.sh` needs on a machine with NVIDIA GPUs, which has no Rust: `tests/gpu/build.sh [--llvm]` writes
# target/gpu/burn-ddp-gpu-kit.tar.xz, at most 60 MiB. See README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
nccl=2.30.3
arch=${KIT_ARCH:-90} # of the GPUs: 90 are H100 and H200, 80 is A100
target=$PWD/target
case ${CARGO_TARGET_DIR:-} in '') ;; /*) target=$CARGO_TARGET_DIR ;; *) target=$PWD/$CARGO_TARGET_DIR ;; esac
pack=$target/gpu
dir=$pack/files
rm -rf "$pack"
mkdir -p "$dir"

features=burn-ddp-tests/gpu-kit,burn-ddp-tests/nccl
case ${1:-} in
  --llvm) ;; # CubeCL downloads its LLVM
  '')
    export XDG_DATA_HOME=$target/gpu-kit-llvm
    tests/gpu/llvm_stand_in.sh
    features+=,burn-ddp-tests/nvrtc
    ;;
  *) echo "usage: $0 [--llvm]" >&2; exit 2 ;;
esac

# With cargo-zigbuild (`pip install cargo-zigbuild ziglang`) the kit runs with an older C library than this machine's. CubeCL's LLVM needs GNU's C++ library.
build=(cargo build)
if [ -z "${1:-}" ] && cargo zigbuild --help >/dev/null 2>&1; then
  build=(cargo zigbuild --target x86_64-unknown-linux-gnu.2.31)
fi
"${build[@]}" --locked --profile gpu-kit -p burn-ddp-tests --features "$features" --test gpu_kit --message-format json-render-diagnostics |
  python3 -c '
import json, shutil, sys
made = [json.loads(line) for line in sys.stdin if line.startswith("{")]
made = [m["executable"] for m in made if m.get("executable") and m["target"]["name"] == "gpu_kit"]
shutil.copy(made[-1], sys.argv[1])
' "$dir/burn-ddp-gpu-kit"

# NCCL lets ranks share a GPU from 2.30 on. Only the device code of one architecture fits.
wheel=$target/nvidia_nccl_cu13-$nccl-py3-none-manylinux_2_18_x86_64.whl
[ -e "$wheel" ] || python3 -m pip download -q --no-deps --only-binary=:all: -d "$target" "nvidia-nccl-cu13==$nccl"
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
python3 -m zipfile -e "$wheel" "$unpacked"
python3 tests/gpu/slim_cuda_library.py "$unpacked/nvidia/nccl/lib/libnccl.so.2" "$dir/libnccl.so.2" --arch "$arch"
cp tests/gpu/run.sh tests/gpu/README.md "$dir/"
git rev-parse HEAD >"$dir/commit" 2>/dev/null || true

ls -l "$dir"
oldest=$(objdump -T "$dir/burn-ddp-gpu-kit" "$dir/libnccl.so.2" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
echo "needs the C library $oldest or newer, and: $(objdump -p "$dir/burn-ddp-gpu-kit" | awk '/NEEDED/ {print $2}' | paste -sd' ')"
tar -C "$dir" -c . | xz -6 -T0 >"$pack/burn-ddp-gpu-kit.tar.xz"
size=$(stat -c %s "$pack/burn-ddp-gpu-kit.tar.xz")
echo "$pack/burn-ddp-gpu-kit.tar.xz: $((size / 1048576)) MiB"
[ "$size" -le $((60 * 1048576)) ] || { echo "$0: more than 60 MiB" >&2; exit 1; }
