#!/bin/bash
# The static burnrun alone in a root directory, as in an empty container: no libraries, no /tmp, no /bin/sh. Usage: static.sh
# [BURNRUN], else it is built here; needs root, and `rustup target add x86_64-unknown-linux-musl`.
. "$(dirname "$0")/common.sh" none # no rank is started
[ "$(id -u)" = 0 ] || { echo "needs root" >&2; exit 1; }
burnrun=${1:-}
if [ -z "$burnrun" ]; then
    (cd "$root" && cargo build --quiet --release -p burn-ddp-launch --target x86_64-unknown-linux-musl) || exit 1
    burnrun=${CARGO_TARGET_DIR:-$root/target}/x86_64-unknown-linux-musl/release/burnrun
fi
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
cp "$burnrun" "$empty/burnrun"
# The files that every container has.
mkdir "$empty/dev" "$empty/proc"
mknod -m 666 "$empty/dev/null" c 1 3
strip "$empty/burnrun" && printf '%s bytes\n' "$(stat -c %s "$empty/burnrun")"

job "two ranks in an empty root" chroot "$empty" /burnrun -n 2 /burnrun --version
succeeded
said "[rank 0] burnrun " 1
said "[rank 1] burnrun " 1

job "a program that is not there" chroot "$empty" /burnrun -n 2 /train
[ "$code" = 127 ] || wrong "the exit code is $code"
said "there is no such file" 1

job "a rank that fails" chroot "$empty" /burnrun -n 2 /burnrun report /nothing
[ "$code" = 1 ] || wrong "the exit code is $code"

mount --bind /proc "$empty/proc"
job "with /proc" chroot "$empty" /burnrun -n 2 /burnrun --version
umount "$empty/proc"
succeeded
finish
