#!/usr/bin/env bash
# Makes a LibTorch 2.9.0 for the processor alone out of PyTorch's wheel: `.ci/libtorch.sh DIR`, then LIBTORCH=DIR to build and
# LD_LIBRARY_PATH=DIR/lib to run. Needs pip, unzip, objdump and cc; downloads 900 MB, leaves 480.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
if [ "$(cat "$dir/build-version" 2>/dev/null)" = 2.9.0+cpu ]; then exit; fi

wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
pip download -q --no-deps --only-binary=:all: --python-version 3.11 --implementation cp --abi cp311 \
  --platform manylinux_2_28_x86_64 -d "$wheel" torch==2.9.0
unzip -q "$wheel"/torch-2.9.0*.whl 'torch/include/*' 'torch/lib/libtorch_cpu.so' 'torch/lib/libc10.so' 'torch/lib/libgomp.so.1' -d "$wheel"
rm -rf "$dir/include" "$dir/lib"
mv "$wheel/torch/include" "$wheel/torch/lib" "$dir/"

cd "$dir/lib"
# The wheel's CPU library is linked with two libraries of CUDA. Stand-ins say what the real ones say without a GPU.
for library in libcudart.so.12 libcupti.so.12; do
  {
    objdump -T libtorch_cpu.so | awk -v from="($library)" 'NF > 1 && $(NF-1) == from { print $NF }' | while read -r symbol; do
      case $symbol in
        cudaGetErrorString) echo "const char *$symbol(int error) { return \"this LibTorch has no CUDA\"; }" ;;
        *) echo "int $symbol(void) { return 100; }" ;; # no device
      esac
    done
  } >"$wheel/stand_in.c"
  echo "$library { global: *; };" >"$wheel/stand_in.map"
  cc -shared -fPIC -O1 -w -o "$library" "$wheel/stand_in.c" -Wl,-soname,"$library" -Wl,--version-script="$wheel/stand_in.map"
done
# libtorch.so of the wheel wants CUDA's half too.
echo >"$wheel/empty.c"
cc -shared -fPIC -o libtorch.so "$wheel/empty.c" -Wl,-soname,libtorch.so -Wl,--no-as-needed -L. -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined
echo 2.9.0+cpu >"$dir/build-version"
