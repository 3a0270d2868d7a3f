#!/bin/bash
# A program built with `panic = "abort"`: no destructor runs there, so the panic hook itself tells the other ranks the message.
# Builds burn-ddp-comm that way into `panic-abort` in the target directory, which takes a minute or more. Usage: panic_abort.sh
. "$(dirname "$0")/launchers/common.sh" none
export CARGO_PROFILE_DEV_PANIC=abort CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}/panic-abort
(cd "$root" && cargo build --quiet --offline -p burn-ddp-comm --example hello) || exit 1
hello=$CARGO_TARGET_DIR/debug/examples/hello

job "a panic that aborts" "$root/tests/launchers/ranks.sh" 3 0 3 "$hello" --steps 3000 --pause 10 --die 1:50:panic
failed
# On the panicking rank and in the errors of the others.
said "told to die" 3
said "rank 1 (host" 2
within 30
no_rank_is_left
finish
