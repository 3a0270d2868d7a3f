#!/bin/bash
# ranks.sh WORLD FIRST COUNT COMMAND…: starts COUNT ranks from rank FIRST on, with plain variables, and waits for all of them.
# LOCAL_RANK and LOCAL_WORLD_SIZE are set if some ranks are started elsewhere.
world=$1 first=$2 count=$3
shift 3
export WORLD_SIZE=${WORLD_SIZE:-$world} MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
pids=() result=0
for ((local = 0; local < count; local++)); do
    export RANK=$((first + local))
    [ "$count" = "$world" ] || export LOCAL_RANK=$local LOCAL_WORLD_SIZE=$count
    "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || result=$?; done
exit $result
