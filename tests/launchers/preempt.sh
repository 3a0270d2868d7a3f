#!/bin/bash
# Jobs that are asked to stop, under each launcher that is installed, on one machine and on two, and that then go on.
# Usage: [TORCHRUN=path] preempt.sh [RANK [BURNRUN]]; RANK is the program `rank` of the system tests; root for two machines.
. "$(dirname "$0")/common.sh"
find_burnrun "${2:-}"
rank=${1:-${CARGO_TARGET_DIR:-$root/target}/debug/rank}
hello=$rank # whose processes must not be left
torchrun=${TORCHRUN:-torchrun}

# preempted WHAT RANKS SIGNAL WHO CODE COMMAND…: runs `COMMAND rank preempt DIRECTORY` until its ranks are ready and a little
# longer, sends SIGNAL to WHO (`launcher`, `rank`, or a command line), expects an exit code of CODE, and runs the command again
# to its end.
preempted() {
    what=$1 ranks=$2 signal=$3 who=$4 expected=$5
    shift 5
    saved=$(mktemp -d) log=$saved/log out=""
    mkdir "$saved/checkpoints"
    # With pauses, so that the signal does not come after the end.
    "$@" "$rank" preempt "$saved/checkpoints" 20 >"$log" 2>&1 &
    launcher=$!
    for _ in $(seq 500); do
        [ "$(grep -c 'ready ' "$log")" = "$ranks" ] && break
        sleep 0.02
    done
    sleep 0.1
    case $who in
        launcher) kill -s "$signal" "$launcher" ;;
        rank) kill -s "$signal" "$(grep -o 'ready [0-9]*' "$log" | tail -n 1 | cut -d ' ' -f 2)" ;;
        *) pkill -s 0 -"$signal" -f "$who" ;;
    esac
    wait "$launcher"
    code=$?
    out=$(cat "$log")
    printf '%s, %s to the %s: exit code %s\n' "$what" "$signal" "$who" "$code"
    [[ " $expected " == *" $code "* ]] || wrong "the exit code is not $expected"
    stopped=$(grep -o 'stopped [0-9]*' "$log" | sort -u)
    said "stopped " "$ranks"
    [ "$(printf '%s\n' "$stopped" | wc -l)" = 1 ] || wrong "the ranks stopped at different steps"
    no_rank_is_left
    job "$what, again" "$@" "$rank" preempt "$saved/checkpoints"
    succeeded
    said "resumed ${stopped#stopped }" "$ranks"
    said "hash " "$ranks"
    hashes=$(printf '%s\n' "$out" | grep -o 'hash .*' | sort -u)
    [ "$hashes" = "${hash:=$hashes}" ] || wrong "the bits are not those of the other jobs"
    rm -rf "$saved"
}

job "undisturbed" "$burnrun" -n 2 "$rank" preempt "$(mktemp -d)"
said "hash " 2
hash=$(printf '%s\n' "$out" | grep -o 'hash .*' | sort -u)

for signal in TERM USR1; do
    export BURN_DDP_PREEMPT_SIGNAL=SIG$signal
    preempted burnrun 2 $signal launcher 75 "$burnrun" -n 2
    preempted burnrun 2 $signal rank 75 "$burnrun" -n 2
    preempted "plain variables" 2 $signal rank 75 "$here/ranks.sh" 2 0 2
    if command -v mpirun.openmpi >/dev/null; then
        openmpi=(mpirun.openmpi --oversubscribe -n 2 -x BURN_DDP_PREEMPT_SIGNAL)
        preempted "Open MPI" 2 $signal rank 75 "${openmpi[@]}"
        # After SIGTERM it waits for a moment only.
        [ $signal = TERM ] || preempted "Open MPI" 2 $signal launcher 75 "${openmpi[@]}"
    fi
    if command -v mpirun.mpich >/dev/null; then
        preempted MPICH 2 $signal rank 75 mpirun.mpich -n 2
        # It sometimes forgets the ranks' codes.
        preempted MPICH 2 $signal launcher "0 75" mpirun.mpich -n 2
    fi
    if command -v "$torchrun" >/dev/null; then
        by=("$torchrun" --no-python --standalone --nproc-per-node 2)
        preempted torchrun 2 $signal rank 1 "${by[@]}"
        # Other signals kill it.
        [ $signal = USR1 ] || preempted torchrun 2 $signal launcher 1 "${by[@]}"
    fi
done
unset BURN_DDP_PREEMPT_SIGNAL

if machines_possible && machines_up; then
    new_secret
    # Two launchers; the signal goes to one of them. The sums of four ranks have other bits.
    hash=""
    burnrun_on_both
    for options in "" "--preempt-signal USR1"; do
        signal=${options##* }
        for node in 0 1; do
            preempted "two machines" 4 "${signal:-TERM}" "burnrun --nnodes 2 --node-rank $node" 75 "$two" $options --
            said "preempted by SIG${signal:-TERM}" 0
        done
    done
    # One launcher here, which starts those of the machines.
    printf 'm1 slots=2\nm2 slots=2\n' >"/tmp/$pair/hosts"
    cat >"/tmp/$pair/ssh" <<END
#!/bin/sh
while :; do case \$1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac; done
exec $at "\$1" sh -c "\$2"
END
    chmod +x "/tmp/$pair/ssh"
    by=("$burnrun" --hostfile "/tmp/$pair/hosts" --ssh "/tmp/$pair/ssh" --remote-burnrun "$burnrun" --join-timeout 30)
    preempted "--hostfile" 4 TERM launcher 75 "${by[@]}"
    preempted "--hostfile" 4 USR1 launcher 75 "${by[@]}" --preempt-signal SIGUSR1
else
    echo "skipped: two machines (needs root, ip and unshare)"
fi
finish
