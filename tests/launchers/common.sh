# Functions and settings of the scripts in this folder. Source it with the script's arguments; the first may be the program to start.

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$root/tests/launchers/machines.sh"
hello=${1:-}
if [ -z "$hello" ]; then
    (cd "$root" && cargo build --quiet --offline --example hello) || exit 1
    hello=${CARGO_TARGET_DIR:-$root/target}/debug/examples/hello
fi
# Time limit of a job, in seconds: enough for a busy machine.
deadline=${DEADLINE:-90}
failures=0
# The jobs must not see the variables of a launcher that runs this script.
for name in $(env | sed -n 's/^\(\(BURN_DDP\|BURNRUN\|OMPI_COMM\|PMI\|PMIX\|SLURM_STEP\|TORCHELASTIC\)_[A-Z_0-9]*\)=.*/\1/p'); do
    unset "$name"
done
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export BURN_DDP_JOIN_TIMEOUT=${BURN_DDP_JOIN_TIMEOUT:-30}

# job WHAT COMMAND…: runs a command; sets $out to its output, $code to its exit code and $took to its seconds.
job() {
    what=$1
    shift
    began=$(date +%s)
    out=$(timeout -k 5 "$deadline" "$@" 2>&1 </dev/null)
    code=$?
    took=$(($(date +%s) - began))
    printf '%s: exit code %s after %s s\n' "$what" "$code" "$took"
    [ "$took" -lt "$deadline" ] || wrong "it hung"
}

wrong() {
    failures=$((failures + 1))
    printf 'WRONG: %s: %s\n' "$what" "$1"
    printf '%s\n' "$out" | sed 's/^/    /'
}

succeeded() { [ "$code" = 0 ] || wrong "it failed"; }
failed() { [ "$code" != 0 ] || wrong "it succeeded"; }
within() { [ "$took" -le "$1" ] || wrong "it took $took s, more than $1 s"; }
# said TEXT [TIMES]: checks that exactly TIMES lines of the output, or at least one, have the text.
said() {
    count=$(printf '%s\n' "$out" | grep -c -F -- "$1")
    if [ -n "${2:-}" ]; then
        [ "$count" = "$2" ] || wrong "$count lines say \"$1\", not $2"
    else
        [ "$count" -gt 0 ] || wrong "nothing says \"$1\""
    fi
}
# all_done RANKS LAUNCHER: checks that this launcher has started all ranks, and that each has ended with the right sum.
all_done() {
    succeeded
    said "started by $2" "$1"
    said "done after" "$1"
    said "sum $(($1 * ($1 + 1) / 2))" "$1"
}

no_rank_is_left() {
    left=$(pgrep -f "^$hello" || true)
    [ -z "$left" ] || { sleep 3; left=$(pgrep -f "^$hello" || true); }
    [ -z "$left" ] || wrong "processes are left: $left"
}

both_ended_with() { said "m1: ended with $1 " 1; said "m2: ended with $1 " 1; }

# after SECONDS COMMAND…: runs a command in the background after a delay.
after() { (sleep "$1"; shift; "$@") & }

# find_burnrun [BURNRUN]: sets $burnrun to the argument, to the variable BURNRUN, or to the program built here.
find_burnrun() {
    burnrun=${1:-${BURNRUN:-}}
    [ -z "$burnrun" ] || return 0
    (cd "$root" && cargo build --quiet --offline --bin burnrun) || exit 1
    burnrun=${CARGO_TARGET_DIR:-$root/target}/debug/burnrun
}

# Makes a new secret in a file, and sets the variable that names it to the ranks.
new_secret() {
    export BURN_DDP_SECRET_FILE=/tmp/$pair/secret
    (umask 077 && od -An -vtx1 -N32 /dev/urandom | tr -d ' \n' >"$BURN_DDP_SECRET_FILE")
}

# installed PROGRAM HOW: ends the script if a program is missing, and prints how to install it.
installed() {
    command -v "$1" >/dev/null || { printf '%s is not installed: %s\n' "$1" "$2" >&2; exit 1; }
}

finish() {
    [ "$failures" = 0 ] && printf 'all as it should be\n'
    exit $((failures > 0))
}
