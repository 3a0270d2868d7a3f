#!/usr/bin/env bash
# Compares the time of `cargo build --bin mnist` from an empty target directory with that of a program of 40 lines on plain Burn (plain/).
# Both have the same network, profile and versions, and are built one after the other. Takes 10 to 20 minutes on 2 idle cores.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0

cp -r "$root/burn-ddp/bench/plain" "$work/plain"
cp "$root/Cargo.lock" "$work/plain/"
# The workspace's profiles, without those of packages that the plain program does not use.
python3 - "$root/Cargo.toml" "$work/plain/Cargo.toml" <<'PY'
import re, sys
ours = open(sys.argv[1]).read()
profiles = re.findall(r"^\[profile\.dev(?:\]|\.package\.(?:\"\*\"|burn-flex|gemm[\w-]*|pulp)\])\n(?:[^\[\n][^\n]*\n)+", ours, flags=re.M)
open(sys.argv[2], "a").write("\n" + "\n".join(profiles))
PY
cargo fetch --manifest-path "$work/plain/Cargo.toml" --quiet
cargo fetch --manifest-path "$root/Cargo.toml" --quiet

# measured NAME DIRECTORY ARGUMENTS…: builds, and prints wall and CPU seconds, and the wall seconds of burn-flex.
measured() {
  local name=$1
  cd "$2"
  shift 2
  TIMEFORMAT='%R %U %S'
  { time cargo build --timings --target-dir "$work/target-$name" "$@" >"$work/$name.log" 2>&1; } 2>"$work/$name.time"
  python3 - "$name" "$work/$name.time" "$work/target-$name/cargo-timings/cargo-timing.html" <<'PY'
import json, re, sys
wall, user, system = map(float, open(sys.argv[2]).read().split())
units = json.loads(re.search(r"const UNIT_DATA = (\[.*?\]);", open(sys.argv[3]).read(), re.S).group(1))
flex = sum(u["duration"] for u in units if u["name"] == "burn-flex")
print(f"{sys.argv[1]}: {wall:.0f} s on the clock, {user + system:.0f} s of processors, {len(units)} units; burn-flex takes {flex:.0f} s of the clock", flush=True)
PY
}
measured plain "$work/plain"
measured mnist "$root" --locked --bin mnist
read -r plain user system <"$work/plain.time"
read -r ours our_user our_system <"$work/mnist.time"
python3 -c "print(f'mnist / plain: {$ours / $plain:.2f} of the clock, {($our_user + $our_system) / ($user + $system):.2f} of processors')"
