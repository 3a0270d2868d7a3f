#!/bin/bash
# Ranks started by Slurm's srun. Usage: slurm.sh [PROGRAM]; needs a running Slurm, or root and
# `apt-get install slurmd slurmctld slurm-client munge`: then it starts a Slurm of one machine for itself.
. "$(dirname "$0")/common.sh"
installed srun "apt-get install slurmd slurmctld slurm-client munge"

own_slurm() {
    dir=$(mktemp -d)
    trap 'kill $(cat "$dir"/*.pid) 2>/dev/null; rm -rf "$dir"' EXIT
    machine=$(hostname)
    cat >"$dir/slurm.conf" <<END
ClusterName=try
SlurmctldHost=$machine(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
SlurmdParameters=config_overrides
NodeName=$machine NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
    printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$dir/cgroup.conf"
    mkdir "$dir/state" "$dir/spool"
    export SLURM_CONF=$dir/slurm.conf
    if ! munge -n </dev/null >/dev/null 2>&1; then
        mkdir -p /run/munge && chown munge /run/munge
        su -s /bin/sh munge -c munged || return 1
    fi
    slurmctld && slurmd || return 1
    for _ in $(seq 30); do
        [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && return
        sleep 1
    done
    return 1
}
if ! timeout 10 sinfo -h >/dev/null 2>&1; then
    own_slurm || { echo "no Slurm answers, and none could be started"; exit 1; }
fi

job "three ranks on this machine" srun -n 3 "$hello" --steps 20
all_done 3 Slurm

job "with Slurm's own PMI" srun --mpi=pmi2 -n 2 "$hello" --steps 20
all_done 2 Slurm

job "two steps of one job at a time" salloc -Q -n 4 bash -c \
    "srun --exact -n 2 $hello --steps 50 --pause 20 & srun --exact -n 2 $hello --steps 20; wait"
succeeded
said "started by Slurm" 4
said "sum 3" 4

job "a rank that is killed" srun --kill-on-bad-exit=1 -n 3 "$hello" --steps 500 --pause 10 --die 1:20:kill
failed
within 30
no_rank_is_left

job "the others end by themselves" srun --kill-on-bad-exit=0 -n 3 "$hello" --steps 500 --pause 10 --die 1:20:kill
failed
within 30
said "rank 1 (host" 2
no_rank_is_left

job "the shell of an allocation" salloc -Q -n 3 "$hello"
failed
said "SLURM_NTASKS=3"

job "alone in an allocation of one" salloc -Q -n 1 "$hello"
all_done 1 nobody

job "variables left over from elsewhere" env RANK=0 WORLD_SIZE=1 srun -n 2 "$hello"
failed
said "SLURM_STEP_NUM_TASKS=2 but WORLD_SIZE=1"

job "a part of its variables" srun -n 2 env -u SLURM_LOCALID "$hello"
failed
said "but SLURM_LOCALID is not"

if command -v mpirun.mpich >/dev/null; then
    job "MPICH's mpirun in an allocation" salloc -Q -n 3 mpirun.mpich -launcher fork -n 3 "$hello" --steps 20
    all_done 3 MPICH
fi
finish
