#!/bin/bash
# Ranks started by Open MPI's mpirun. Usage: openmpi.sh [PROGRAM]; needs `apt-get install openmpi-bin`; root for two machines.
. "$(dirname "$0")/common.sh"
mpirun=mpirun.openmpi
installed $mpirun "apt-get install openmpi-bin"

job "three ranks on this machine" $mpirun --oversubscribe -n 3 "$hello" --steps 20
all_done 3 "Open MPI"

$mpirun --oversubscribe -n 2 "$hello" --steps 50 --pause 20 >/tmp/openmpi.$$ 2>&1 &
job "a second job meanwhile" $mpirun --oversubscribe -n 3 "$hello" --steps 20
all_done 3 "Open MPI"
wait $! || wrong "the first job failed"
out=$(cat /tmp/openmpi.$$) && rm -f /tmp/openmpi.$$
said "sum 3" 2

job "one rank" $mpirun -n 1 "$hello"
all_done 1 "Open MPI"

job "a rank that is killed" $mpirun --oversubscribe -n 3 "$hello" --steps 500 --pause 10 --die 1:20:kill
failed
within 30
no_rank_is_left

job "a rank that panics" $mpirun --oversubscribe -n 3 "$hello" --steps 500 --pause 10 --die 2:20:panic
failed
said "told to die"
no_rank_is_left

job "variables left over from elsewhere" env RANK=0 WORLD_SIZE=1 $mpirun --oversubscribe -n 2 "$hello"
failed
said "OMPI_COMM_WORLD_SIZE=2 but WORLD_SIZE=1"

job "a part of its variables" $mpirun --oversubscribe -n 2 env -u OMPI_COMM_WORLD_SIZE "$hello"
failed
said "but OMPI_COMM_WORLD_SIZE is not"

if machines_possible && machines_up; then
    two=("${on1[@]}" $mpirun -H m1:2,m2:2 --mca plm_rsh_agent "$rsh" -n 4)
    job "two machines, not told where to meet" "${two[@]}" "$hello"
    failed
    said "mpirun -x BURN_DDP_MASTER=node1:29500"

    job "two machines without a secret" "${two[@]}" -x BURN_DDP_MASTER=m1:29500 "$hello"
    failed
    said "burnrun secret"

    new_secret
    place="-x BURN_DDP_MASTER=m1:29500 -x BURN_DDP_SECRET_FILE=$BURN_DDP_SECRET_FILE"
    job "two machines" "${two[@]}" $place "$hello" --steps 20
    all_done 4 "Open MPI"
    said "local rank 1 of 2, machine 1"

    job "a rank killed on the other machine" "${two[@]}" $place "$hello" --steps 500 --pause 10 --die 3:20:kill
    failed
    within 30
    no_rank_is_left
else
    echo "skipped: two machines (needs root, ip and unshare)"
fi
finish
