#!/bin/bash
# Ranks started by MPICH's mpirun (Hydra). Usage: mpich.sh [PROGRAM]; needs `apt-get install mpich`; root for two machines.
. "$(dirname "$0")/common.sh"
mpirun=mpirun.mpich
installed $mpirun "apt-get install mpich"

job "three ranks on this machine" $mpirun -n 3 "$hello" --steps 20
case $out in *"--cap-add SYS_PTRACE"*) echo "skipped: this container does not let ranks reach mpirun's socket"; exit ;; esac
all_done 3 MPICH

$mpirun -n 2 "$hello" --steps 50 --pause 20 >/tmp/mpich.$$ 2>&1 &
job "a second job meanwhile" $mpirun -n 3 "$hello" --steps 20
all_done 3 MPICH
wait $! || wrong "the first job failed"
out=$(cat /tmp/mpich.$$) && rm -f /tmp/mpich.$$
said "sum 3" 2

job "one rank" $mpirun -n 1 "$hello"
all_done 1 MPICH

job "a rank that is killed" $mpirun -n 3 "$hello" --steps 500 --pause 10 --die 1:20:kill
failed
within 30
no_rank_is_left

job "a rank that panics" $mpirun -n 3 "$hello" --steps 500 --pause 10 --die 2:20:panic
failed
said "told to die"
no_rank_is_left

job "variables left over from elsewhere" env RANK=0 WORLD_SIZE=1 $mpirun -n 2 "$hello"
failed
said "PMI_SIZE=2 but WORLD_SIZE=1"

job "a part of its variables" $mpirun -n 2 env -u PMI_SIZE "$hello"
failed
said "but PMI_SIZE is not"

job "its socket closed" $mpirun -n 2 bash -c "eval \"exec \$PMI_FD>&-\"; exec $hello"
failed
said "is not open in this process"

if machines_possible && machines_up; then
    two=("${on1[@]}" $mpirun -hosts m1:2,m2:2 -launcher-exec "$rsh" -n 4)
    job "two machines, nothing told" "${two[@]}" "$hello" --steps 20
    all_done 4 MPICH
    said "local rank 1 of 2, machine 1"

    job "two machines, everything shown" "${on1[@]}" $mpirun -verbose -hosts m1:2,m2:2 -launcher-exec "$rsh" -n 4 "$hello" --steps 20
    all_done 4 MPICH
    said "value=made@"
    printf '%s\n' "$out" | grep -qE '[0-9a-f]{64}@' && wrong "mpirun's log shows the secret"

    new_secret
    job "two machines, a place and a secret given" \
        env BURN_DDP_MASTER=m1:29500 "${two[@]}" "$hello" --steps 20
    all_done 4 MPICH

    unset BURN_DDP_SECRET_FILE
    job "a rank killed on the other machine" "${two[@]}" "$hello" --steps 500 --pause 10 --die 3:20:kill
    failed
    within 30
    no_rank_is_left
else
    echo "skipped: two machines (needs root, ip and unshare)"
fi
finish
