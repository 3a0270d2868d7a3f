#!/bin/bash
# The mpi engine under a launcher of MPI. Usage: mpi_engine.sh MPIRUN TARGET_DIR, where TARGET_DIR/debug/examples has what
# `MPICC=mpicc.mpich cargo build -p burn-ddp-mpi --examples` built with the same MPI. MPIRUN is mpirun.mpich or mpirun.openmpi.
mpirun=${1:?which mpirun}
program=${2:?the target directory}/debug/examples/mpi_ranks
export DEADLINE=${DEADLINE:-180}
. "$(dirname "$0")/common.sh" "$program"
installed "$mpirun" "apt-get install mpich, or openmpi-bin"
[ -x "$program" ] || { echo "$program is not there: cargo build -p burn-ddp-mpi --examples" >&2; exit 1; }

# Without the options in $alone a launcher kills all ranks when one fails; with them the ranks have to end by themselves, and Open MPI's
# mpirun exits with 0. So a rank that fails prints its error and exits with 3.
case $("$mpirun" --version 2>&1) in
*"Open MPI"* | *OpenRTE*)
    run="$mpirun --oversubscribe"
    alone="--mca orte_enable_recovery 1 --mca orte_abort_on_non_zero_status 0"
    killed=("$program")
    ;;
*)
    run=$mpirun
    alone=-disable-auto-cleanup
    # MPICH's mpirun still kills the other ranks if a signal ends one, often before they print their errors. The shell turns the signal into
    # an exit code.
    killed=(bash -c 'trap "" USR1; "$0" "$@"; exit $?' "$program")
    ;;
esac
export BURN_DDP_TIMEOUT=${BURN_DDP_TIMEOUT:-60}
# UCX aborts a process that reads the memory of a rank that has died (cma), and MPICH 4.0 over its tcp may hang in MPI_Finalize.
export UCX_TLS=${UCX_TLS:-self,posix}

# Checks the milliseconds after which the ranks gave up.
ended_within() {
    late=$(printf '%s\n' "$out" | sed -n 's/.*after \([0-9]*\) ms: .*/\1/p' | awk -v most="$1" '$1 > most')
    [ -z "$late" ] || wrong "a rank gave up after $late ms, more than $1"
}

for n in 1 2 3 4; do
    job "$n ranks: every collective" $run -n $n "$program" all
    succeeded
    said "of $n: done" $n
    said "all ranks:" $n
    said "two groups at once:" $((2 * n))
    said "of a part:" $n
done

job "a rank that leaves early and is not needed" $run -n 3 "$program" leaves-early
succeeded
said "of 3: done" 3

job "different calls" $run $alone -n 3 "$program" mismatch
said "ranks called different collectives" 3
said "called broadcast #0 of group 1 (f32, root 0, 100000 elements) called at" 3
said "rank 2 called barrier #0 of group 1 called at" 3
ended_within 20000

job "a rank that is killed" $run $alone -n 3 "${killed[@]}" kill
said "rank 0: after"
said "rank 1: after"
said "rank 2 (host" 2
said "died" 2
ended_within 20000
no_rank_is_left

job "a rank that ends without a word" $run $alone -n 3 "$program" exit
said "rank 2 (host" 2
said "died" 2
ended_within 20000
no_rank_is_left

job "a rank that panics" $run $alone -n 3 "$program" panic
said "rank 2 (host" 2
said "failed: panicked" 2
ended_within 20000
no_rank_is_left

# The rank that leaves ends last: MPI_Finalize waits for the other ranks, at most as long as a collective may take.
BURN_DDP_TIMEOUT=10 job "a rank that leaves while it is needed" $run $alone -n 3 "$program" leave
said "left while it was needed by all_reduce #10 of group 1"
said "left while it was needed by all_reduce #" 2 # the first to see it may end it for one that is still in #9
ended_within 20000
no_rank_is_left

BURN_DDP_TIMEOUT=4 job "a rank that never comes" $run $alone -n 3 "$program" late
said "waited 4 s for rank 2 in all_reduce #10 of group 1" 3
ended_within 30000
no_rank_is_left

job "a rank that is killed, as launchers have it by themselves" $run -n 3 "$program" kill
failed
within 30
no_rank_is_left

job "another launcher's ranks" bash -c 'for rank in 0 1; do
    env RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29571 "$0" all &
done; wait -n && exit 0; wait; exit 3' "$program"
failed
said "was started with this process alone, but there are 2 ranks" 2
finish
