#!/bin/sh
# Runs the fuzz targets; needs a stable toolchain and a C++ compiler: fuzz/run.sh [AMOUNT] [TARGET...]
# AMOUNT is a number of runs for each target (10000000 by default), or a short time such as 5s, for which the build is not optimized.
# Inputs that fail are written to fuzz/artifacts, new inputs to fuzz/corpus; git ignores both. Each target starts from its inputs in
# fuzz/corpus and in fuzz/seeds.
set -eu
cd "$(dirname "$0")"
amount=${1:-10000000}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- $(ls targets | sed 's/\.rs$//')

RUSTC_WRAPPER=$PWD/rustc_with_coverage.sh
export RUSTC_WRAPPER
unset RUSTFLAGS
target=$(rustc -vV | sed -n 's/host: //p')
built=${CARGO_TARGET_DIR:-target}
case $amount in *s) profile=short how_long=-max_total_time=${amount%s} ;; *) profile=release how_long=-runs=$amount ;; esac
cargo build --locked --profile "$profile" --target "$target" --target-dir "$built"
for name; do
    mkdir -p "corpus/$name" "seeds/$name" "artifacts/$name"
    echo "== $name"
    "$built/$target/$profile/$name" "$how_long" -max_len=4096 -rss_limit_mb=1024 -timeout=10 -print_final_stats=1 \
        -verbosity=0 -artifact_prefix="artifacts/$name/" "corpus/$name" "seeds/$name"
done
