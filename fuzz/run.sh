#!/bin/sh
# Runs the fuzz targets, on a stable toolchain and a C++ compiler: fuzz/run.sh [AMOUNT] [TARGET...]
# AMOUNT is a number of runs for each target (10000000 by default), or a short time such as 5s, for which nothing is optimized.
# What is found lies in fuzz/artifacts, new inputs in fuzz/corpus; both are ignored by git. Runs begin with those and with fuzz/seeds,
# examples of what the parsers understand.
set -eu
cd "$(dirname "$0")"
amount=${1:-10000000}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- $(ls targets | sed 's/\.rs$//')

# What cargo-fuzz passes, without a sanitizer: the parsers are safe code, and the files with unsafe code are none of the targets.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
target=$(rustc -vV | sed -n 's/host: //p')
built=${CARGO_TARGET_DIR:-target}
case $amount in *s) profile=short how_long=-max_total_time=${amount%s} ;; *) profile=release how_long=-runs=$amount ;; esac
# With --target, build scripts are built without these flags.
cargo build --locked --profile "$profile" --target "$target" --target-dir "$built"
for name; do
    mkdir -p "corpus/$name" "seeds/$name" "artifacts/$name"
    echo "== $name"
    "$built/$target/$profile/$name" "$how_long" -max_len=4096 -rss_limit_mb=1024 -timeout=10 -print_final_stats=1 \
        -verbosity=0 -artifact_prefix="artifacts/$name/" "corpus/$name" "seeds/$name"
done
