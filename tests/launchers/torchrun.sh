#!/bin/bash
# Ranks started by torchrun. Usage: [TORCHRUN=path] torchrun.sh [PROGRAM]; needs `pip install torch==2.9.0`; root for two machines.
. "$(dirname "$0")/common.sh"
torchrun=${TORCHRUN:-torchrun}
installed "$torchrun" "pip install torch==2.9.0, or TORCHRUN=/path/to/venv/bin/torchrun"
export OMP_NUM_THREADS=1

job "standalone" "$torchrun" --no-python --standalone --nproc-per-node 3 "$hello" --steps 20
all_done 3 torchrun

job "one machine, static" "$torchrun" --no-python --nnodes 1 --master-port 29507 --nproc-per-node 3 "$hello" --steps 20
all_done 3 torchrun

"$torchrun" --no-python --standalone --nproc-per-node 2 "$hello" --steps 300 --pause 20 >/tmp/torchrun.$$ 2>&1 &
job "a second job meanwhile" "$torchrun" --no-python --standalone --nproc-per-node 3 "$hello" --steps 20
all_done 3 torchrun
wait $! || wrong "the first job failed"
out=$(cat /tmp/torchrun.$$) && rm -f /tmp/torchrun.$$
said "sum 3" 2

job "a rank that is killed" "$torchrun" --no-python --standalone --nproc-per-node 3 \
    "$hello" --steps 500 --pause 10 --die 1:20:kill
failed
within 45
no_rank_is_left

# The rank dies only in the first generation.
job "a restart" "$torchrun" --no-python --standalone --nproc-per-node 2 --max-restarts 1 \
    sh -c "[ \$TORCHELASTIC_RESTART_COUNT = 1 ] && exec $hello --steps 20; exec $hello --steps 500 --pause 10 --die 1:20:kill"
succeeded
said "sum 3" 2
no_rank_is_left

job "variables left over from elsewhere" env BURN_DDP_RANK=0 BURN_DDP_WORLD_SIZE=1 BURN_DDP_MASTER=127.0.0.1:29500 \
    "$torchrun" --no-python --standalone --nproc-per-node 2 "$hello"
failed
said "BURN_DDP_WORLD_SIZE=1 but WORLD_SIZE=2"

if machines_possible && machines_up; then
    cat >"/tmp/$pair/two" <<END
#!/bin/sh
run="$torchrun --no-python --nnodes 2 --nproc-per-node 2 --master-addr m1 --master-port 29500"
GLOO_SOCKET_IFNAME=$pair-1 $at m1 \$run --node-rank 0 "\$@" & first=\$!
GLOO_SOCKET_IFNAME=$pair-2 $at m2 \$run --node-rank 1 "\$@"; result=\$?
wait \$first || result=\$?
exit \$result
END
    chmod +x "/tmp/$pair/two"
    two=/tmp/$pair/two

    job "two machines without a secret" "$two" "$hello"
    failed
    said "burnrun secret"

    new_secret
    job "two machines" "$two" "$hello" --steps 20
    all_done 4 torchrun
    said "local rank 1 of 2, machine 1"

    job "a rank killed on the other machine" "$two" "$hello" --steps 500 --pause 10 --die 3:20:kill
    failed
    no_rank_is_left
else
    echo "skipped: two machines (needs root, ip and unshare)"
fi
finish
