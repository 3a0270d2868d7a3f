#!/bin/sh
# Stands between cargo and rustc (`RUSTC_WRAPPER`): adds coverage to the crates of the fuzz targets, but not to build scripts, which are built
# without `--target`, nor to ciphers and hashes. Those have no branches that depend on what a peer sends, and run tens of times slower with it.
rustc=$1
shift
case " $* " in
    *" --crate-name blake2 "* | *" --crate-name chacha20 "* | *" --crate-name chacha20poly1305 "* | *" --crate-name curve25519_dalek "* | \
        *" --crate-name poly1305 "* | *" --crate-name sha2 "*) ;;
    *" --target "*)
        # What cargo-fuzz passes, without a sanitizer: the parsers are safe code, and the files with unsafe code are none of the targets.
        exec "$rustc" "$@" --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
        ;;
esac
exec "$rustc" "$@"
