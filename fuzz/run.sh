#!/bin/sh
# Runs the fuzz targets, on a stable toolchain: fuzz/run.sh [RUNS] [TARGET...]   (10,000,000 runs of each by default)
# What is found lies in fuzz/artifacts; inputs worth keeping in fuzz/corpus. Both are ignored by git.
set -eu
cd "$(dirname "$0")"
runs=${1:-10000000}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- handshake frame wire store control rendezvous reports secret object

# What cargo-fuzz passes, without a sanitizer: those need a nightly toolchain. The parsers are safe code; the files of comm with
# unsafe code are none of the targets.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"
target=$(rustc -vV | sed -n 's/host: //p')
# With --target, build scripts are built without these flags.
cargo build --release --target "$target"
for name; do
    mkdir -p "corpus/$name" "artifacts/$name"
    echo "== $name"
    "target/$target/release/$name" -runs="$runs" -max_len=4096 -rss_limit_mb=1024 -timeout=10 -print_final_stats=1 \
        -verbosity=0 -artifact_prefix="artifacts/$name/" "corpus/$name"
done
