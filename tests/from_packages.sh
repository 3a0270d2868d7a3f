#!/bin/bash
# A newcomer's first hour with the packages that `cargo publish` would upload: burnrun installed, and in an empty folder a program
# with the quickstart's manifest and the README's loop, which trains alone and on two ranks.
# Usage: from_packages.sh [FOLDER]: an empty folder, which is not removed; without it, a temporary one. Builds Burn anew: 20 minutes of CPU time.
#    or: from_packages.sh --shared: the packages in the place of their sources in a copy of this workspace, so that Burn is taken from
#        the target directory of `cargo build`; burnrun is not installed, and the manifest is not the quickstart's.
# Both need the package registry.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
shared=
if [ "${1:-}" = --shared ]; then
    shared=$(realpath "${CARGO_TARGET_DIR:-$root/target}")
    shift
fi
folder=${1:-$(mktemp -d)}
[ -n "${1:-}" ] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/packages" "$folder/.cargo"
folder=$(realpath "$folder")
unset CARGO_TARGET_DIR

packages() { (cd "$root" && cargo publish --workspace --dry-run --no-verify --allow-dirty --locked --quiet --target-dir "$folder/target"); }
packages 2>"$folder/log" || { cat "$folder/log" >&2; exit 1; }
find "$folder/target/package" -name '*.crate' -exec tar -xzf {} -C "$folder/packages" \;
rm -rf "$folder/target"
# No registry has the packages yet: patches say where they are.
patch() { echo "patch.crates-io.$1.path = \"$2\"" >>"$folder/.cargo/config.toml"; }

# The first block of a Markdown file in a language.
block() { awk -v fence="\`\`\`$2" '/^```/ { if (inside) exit; inside = $0 ~ "^" fence; next } inside' "$root/$1"; }
program() { block README.md rust && cat "$root/tests/fixtures/newcomer.rs"; }

commands=0
run() {
    commands=$((commands + 1))
    echo "$commands. $*"
    "$@"
}

# What a newcomer types.
alone() {
    for package in "$folder"/packages/*; do
        patch "$(basename "${package%-*}")" "$package"
    done
    launch=$(echo "$folder"/packages/burn-ddp-launch-*)
    cd "$folder"
    # Once they are published: cargo install burn-ddp-launch.
    run cargo install --quiet --path "$launch" --root "$folder"
    run cargo new --quiet --vcs none train
    cd train
    sed -i '/^\[dependencies\]$/d' Cargo.toml
    block docs/quickstart.md toml | sed "s/^burn-ddp = .*/burn-ddp = \"${launch##*-}\"/" >>Cargo.toml
    program >src/main.rs
    run cargo build --quiet
    program=target/debug/train burnrun=$folder/bin/burnrun
}

# A workspace with the features and profiles of this one, so that its dependencies are those already built.
beside_others() {
    mkdir -p "$folder/train/src" "$folder/burn-ddp"
    cd "$folder"
    (cd "$root" && git ls-files Cargo.toml Cargo.lock tests burn-ddp-examples burn-ddp/bench | tar -cT -) | tar -x
    for package in packages/*; do
        name=$(basename "${package%-*}") place=burn-ddp/
        [ "$name" = burn-ddp ] || place=burn-ddp/${name#burn-ddp-}/
        mkdir -p "$place"
        cp -r "$package"/* "$place"
        patch "$name" "$folder/$place"
    done
    # The program joins the default members; what is built here is not worth optimising.
    sed -i -e '/^default-members/s/\]$/, "train"]/' -e '/^members/s/\]$/, "train"]/' \
        -e '/^\[profile.dev.package.burn-ddp\(-comm\)\?\]$/{n;s/=.*/= 0/}' Cargo.toml
    cat >train/Cargo.toml <<'END'
[package]
name = "train"
version = "0.0.0"
edition = "2024"

[dependencies]
burn = { version = "0.22.1", default-features = false, features = ["flex"] }
burn-ddp = "*"
anyhow = "1"
END
    program >train/src/main.rs
    run cargo build --offline --quiet --target-dir "$shared" --bin train --bin burnrun
    cd train
    program=$shared/debug/train burnrun=$shared/debug/burnrun
}

if [ -n "$shared" ]; then beside_others; else alone; fi
run "$program" >alone
rm model*
run "$burnrun" -n 2 "$program" >two

# falls FILE PATTERN: checks that the loss, in the lines that begin with the pattern, has fallen by half, after at least 500 steps.
falls() {
    read -r steps first last < <(awk -v begin="$2" '$0 ~ begin { if (!n++) first = $NF; last = $NF } END { print n, first, last }' "$1")
    echo "$2: $steps steps, loss $first to $last"
    awk -v steps="$steps" -v first="$first" -v last="$last" 'BEGIN { exit !(steps >= 500 && last < first / 2) }'
}
falls alone '^loss'
falls two '^.rank 0. loss'
falls two '^.rank 1. loss'
ls model*
[ "$commands" -le 10 ]
echo "ok: two ranks trained after $commands commands"
