#!/bin/bash
# The library with a version of Burn that is not released: checks a copy of this tree in a folder of its own, so that nothing here changes.
# Usage: next_burn.sh [BURN CUBECL [CARGO ARGUMENTS]], as in: next_burn.sh 0.23.0-pre.1 0.12.0-pre.1 test --lib
# Prints what does not compile. Needs the package registry; builds Burn anew.
set -euo pipefail
cd "$(dirname "$0")/.."
burn=${1:-0.23.0-pre.1} cubecl=${2:-0.12.0-pre.1}
shift $(($# < 2 ? $# : 2))
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/next-burn
git ls-files -z --cached --others --exclude-standard --deduplicate | xargs -0 sh -c 'for f; do [ ! -e "$f" ] || printf "%s\\0" "$f"; done' sh |
  tar -c --null -T - | tar -xC "$folder"
cd "$folder"
sed -i -E "s/^(burn(-cubecl|-fusion)?) = \{ version = \"[^\"]*\"/\1 = { version = \"=$burn\"/
s/^cubecl-server = \{ version = \"[^\"]*\"/cubecl-server = { version = \"=$cubecl\"/" Cargo.toml
# What is known to break: see CONTRIBUTING.md.
sed -i -E 's/^(ndarray|tch) = \["burn\/.*/\1 = []/' burn-ddp/Cargo.toml
grep -rlE '^    (NdArray|LibTorch): cfg' burn-ddp/src | xargs sed -i -E '/^    (NdArray|LibTorch): cfg\(feature = "(ndarray|tch)"\),$/d'
cargo update --quiet
export CARGO_TARGET_DIR=$target
if [ $# -gt 0 ]; then cargo "$@"; else cargo check --keep-going -p burn-ddp; fi
