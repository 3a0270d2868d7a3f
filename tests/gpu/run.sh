#!/usr/bin/env bash
# Verifies burn-ddp on NVIDIA GPUs with what `build.sh` made: `DIR/run.sh [RANKS]`, by default one rank per GPU. Prints a line per check; the
# outputs are in DIR/out. With more ranks than GPUs they share them, which takes NCCL 2.30.
set -uo pipefail
cd "$(dirname "$0")"
gpus=$(nvidia-smi -L | wc -l)
ranks=${1:-$gpus}
mkdir -p out "$(dirname "$(cat rank.path)")"
ln -sf "$PWD/rank" "$(cat rank.path)"
export BURN_DEVICE=cuda BURN_DDP_ENGINE=nccl RUST_BACKTRACE=0 RUST_LOG=burn_ddp=info
if [ "$ranks" -gt "$gpus" ] || [ "$gpus" -lt 3 ]; then # the suites use up to three ranks
  export BURN_DDP_SHARE_DEVICES=1 NCCL_MULTI_RANK_GPU_ENABLE=1
fi
failed=0
check() { # name, seconds, command…
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  if timeout "$limit" "$@" >"out/$name.txt" 2>&1; then result=ok; else result="FAILED ($?)"; failed=1; fi
  printf '%-28s %-12s %4s s\n' "$name" "$result" $((SECONDS - start))
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
check devices 20 ./burnrun devices
check doctor 60 ./burnrun doctor
# NCCL through burn-ddp: right results, and time against a loop of ncclAllReduce.
check nccl-1 120 ./burnrun -n 1 ./nccl_check
[ "$ranks" -lt 2 ] || check "nccl-$ranks" 180 ./burnrun -n "$ranks" ./nccl_check
# The system tests: gradients against one rank, the awkward models, mixed devices.
for suite in gradients models mixed awkward; do check "$suite" 600 "./test-$suite" --test-threads 1; done
# The same without NCCL: gradients through host memory.
for suite in gradients models; do check "$suite-shm" 600 env BURN_DDP_ENGINE=shm "./test-$suite" --test-threads 1; done
# Whole trainings.
check mnist 300 ./burnrun -n "$ranks" ./mnist --epochs 2 --summary out/mnist.json
check resnet 300 ./burnrun -n "$ranks" ./resnet --data synthetic --epochs 2 --summary out/resnet.json
# What intercepting and reducing costs: at world 1 and more, beside torch's DDP if python3 has torch; by number of tensors; and by size of buckets,
# of which the last takes all gradients, so that nothing overlaps.
worlds=$(echo 1 "$ranks" | xargs -n 1 | sort -nu | paste -sd ,)
check step 300 ./burn-ddp-bench step --engine nccl --world "$worlds"
check tensors 300 ./burn-ddp-bench step --model tensors --engine nccl --world "$ranks" --counts 10,1000 --rounds 5 --alone
check buckets 300 ./burn-ddp-bench step --model mlp --engine nccl --world "$ranks" --bytes 134217728 --counts 512 \
  --bucket-bytes 1048576,26214400,1073741824 --alone

grep -hE "×|us|ratio" out/nccl-*.txt
cat out/step.txt out/tensors.txt out/buckets.txt
exit $failed
