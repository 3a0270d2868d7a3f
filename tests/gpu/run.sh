#!/usr/bin/env bash
# Verifies and times burn-ddp on the NVIDIA GPUs of this machine: `./run.sh` for all, `./run.sh b d` for some steps. See README.md.
# Failures do not stop it; it ends after KIT_SECONDS (1200). Outputs are in `out`, packed as `out.tar.gz`; the last lines are a table.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
shopt -s nullglob

# `run.sh spread FILTER`: system tests in several processes, since each compiles its kernels on one core for most of its time.
if [ "${1:-}" = spread ]; then
  export BURN_DDP_TEST_THREADS_ALONE=1
  parts=$(($(nproc) / 2))
  tests=$(./burn-ddp-gpu-kit --list "$2" | sed -n 's/: test$//p')
  [ -n "$tests" ] || { echo "no test begins with $2"; exit 1; }
  [ "$parts" -ge 1 ] || parts=1
  running=()
  for ((part = 0; part < parts; part++)); do
    mapfile -t some < <(awk "NR % $parts == $part" <<<"$tests")
    [ ${#some[@]} -gt 0 ] || continue
    ./burn-ddp-gpu-kit --test-threads 1 --exact "${some[@]}" &
    running+=($!)
  done
  code=0
  for pid in "${running[@]}"; do wait "$pid" || code=$?; done
  exit $code
fi

# `run.sh ranks N COMMAND…`: N ranks without a launcher, which would end the others when one dies. Ends with rank 0.
if [ "${1:-}" = ranks ]; then
  world=$2
  shift 2
  export WORLD_SIZE=$world MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
  for ((rank = 1; rank < world; rank++)); do RANK=$rank "$@" & done
  RANK=0 "$@"
  code=$?
  jobs -p | xargs -r kill -KILL 2>/dev/null
  exit $code
fi

steps=${*:-a b c d e f g h}
for step in $steps; do
  [[ $step == [a-h] ]] || { echo "usage: $0 [a|b|c|d|e|f|g|h]..." >&2; exit 2; }
done
end=$((SECONDS + ${KIT_SECONDS:-1200}))
export BURN_DEVICE=${BURN_DEVICE:-cuda} BURN_DDP_ENGINE=${BURN_DDP_ENGINE:-nccl}
export RUST_BACKTRACE=0 RUST_LOG=${RUST_LOG:-burn_ddp=info} BURN_DDP_TIMEOUT=60 BURN_DDP_JOIN_TIMEOUT=60
engine=$BURN_DDP_ENGINE
# Ranks share GPUs if there are fewer than four.
export BURN_DDP_SHARE_DEVICES=1 NCCL_MULTI_RANK_GPU_ENABLE=1
[ -e libnccl.so.2 ] && export BURN_DDP_NCCL=$PWD/libnccl.so.2

# One file is all programs, by the name under which it is started. These are copies, since a program starts ranks by its own path.
for program in burnrun burn-ddp-bench gpt mnist nccl_check rank resnet; do
  cmp -s "$program" burn-ddp-gpu-kit || cp -f burn-ddp-gpu-kit "$program"
done

# CubeCL compiles kernels by NVRTC, with CUDA's headers: in an installed CUDA, or in pip's packages.
python=${KIT_PYTHON:-python3}
wheels=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
nvcc=$(dirname "$(dirname "$(command -v nvcc || echo /-/-)")")
for cuda in ${CUDA_PATH:-} /usr/local/cuda "$nvcc" /opt/cuda ${wheels:+"$wheels/cu13" "$wheels/cuda_runtime"}; do
  [ -e "$cuda/include/cuda_fp16.h" ] && { export CUDA_PATH=$cuda; break; }
done
mkdir -p lib out
for nvrtc in \
  ${CUDA_PATH:+"$CUDA_PATH"/lib64/libnvrtc.so* "$CUDA_PATH"/lib/libnvrtc.so* "$CUDA_PATH"/targets/x86_64-linux/lib/libnvrtc.so*} \
  ${wheels:+"$wheels"/cu13/lib/libnvrtc.so* "$wheels"/cuda_nvrtc/lib/libnvrtc.so*}; do
  ln -sf "$nvrtc" lib/libnvrtc.so # the name that is looked for
  LD_LIBRARY_PATH=$PWD/lib:$(dirname "$nvrtc")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  break
done
[ -d /usr/local/nvidia/bin ] && PATH=$PATH:/usr/local/nvidia/bin
[ -d /usr/local/nvidia/lib64 ] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}

rows=() shown=()
# check STEP NAME SECONDS PATTERN COMMAND…: runs the command. Its output must have a line with PATTERN; such lines are printed at the end.
check() {
  local step=$1 name=$2 limit=$3 pattern=$4 start=$SECONDS result code lines
  shift 4
  limit=${KIT_CHECK_SECONDS:-$limit}
  [[ " $steps " == *" $step "* ]] || return 0
  [ $limit -gt $((end - SECONDS)) ] && limit=$((end - SECONDS))
  if [ $limit -lt 5 ]; then
    rows+=("$step|$name|skipped: no time||")
    return 0
  fi
  # The pause before KILL is for a launcher, which ends its ranks.
  timeout --kill-after=8 "$limit" "$@" >"out/$name.txt" 2>&1 </dev/null
  code=$?
  lines=$(grep -aE "$pattern" "out/$name.txt")
  case $code in
    0) [ -n "$lines" ] && result=ok || result="FAILED: no result" ;;
    124 | 137) result="FAILED: over $limit s" ;;
    *) result="FAILED: exit code $code" ;;
  esac
  rows+=("$step|$name|$result|$((SECONDS - start)) s|$(tail -n 1 <<<"$lines" | cut -c 1-90)")
  shown+=("== $step $name: $result"$'\n'"$(if [ "$result" = ok ]; then head -n 14 <<<"$lines"; else
    grep -aiE "^test .*failed|panicked|error" "out/$name.txt" | grep -av "^\s*$" | head -n 8
    echo "…"
    tail -n 5 "out/$name.txt"
  fi | cut -c 1-220)")
  echo "$(date +%T) $step $name: $result, $((SECONDS - start)) s"
}
# suite STEP NAME SECONDS FILTER…: system tests, by the beginnings of their names.
suite() { check "$1" "$2" "$3" "^test result:" ./burn-ddp-gpu-kit --test-threads 1 "${@:4}"; }
bench() { check "$1" "$2" "$3" "^\| " ./burn-ddp-bench step --engine "$engine" "${@:4}"; }

{
  date
  uname -a
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no GPU: there is no nvidia-smi"
  echo "CUDA_PATH=${CUDA_PATH:-, none found} LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
  readlink lib/libnvrtc.so
  "$python" -c 'import torch; print("torch", torch.__version__, "NCCL", torch.cuda.nccl.version())' 2>&1 | tail -n 1
} 2>/dev/null | tee out/machine.txt

# a: one rank, NCCL forced: the driver and NCCL by themselves, then training steps with a gradient that is known.
check a devices 15 . ./burnrun devices
check a nccl-1 60 "reductions are right" ./burnrun -n 1 ./nccl_check --rounds 5
bench a train-1 60 --model tensors --world 1 --counts 10 --rounds 2 --alone

# b: more ranks, on one GPU if there is one: collectives, then gradients against one rank.
for n in 2 4; do check b "nccl-$n" 60 "reductions are right" ./burnrun -n $n ./nccl_check --rounds 5; done
suite b processes 100 processes::every_world_size
suite b gradients 150 gradients::

# c: torch's numbers; models of many kinds; models that are hard to intercept.
suite c parity 90 parity::
suite c models 90 models:: mixed:: --skip awkward::
check c awkward 400 "^test result:" ./run.sh spread awkward::

# d: all-reduce beside a loop of ncclAllReduce.
for n in 1 2; do check d "all-reduce-$n" 60 "ratio" ./burnrun -n $n ./nccl_check --rounds 40; done

# e: a step beside plain Burn; by number of tensors; by size of buckets; the largest bucket holds all gradients, so that nothing overlaps.
# Ranks that share a GPU take turns of milliseconds: their times say nothing.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" = 1 ] && worlds=1 || worlds=1,2
bench e step 60 --world $worlds --rounds 6 --alone
bench e tensors 60 --model tensors --world $worlds --counts 10,100 --rounds 4 --alone
[ "$worlds" = 1 ] || bench e buckets 60 --model mlp --world 2 --bytes 134217728 --counts 512 --bucket-bytes 1048576,26214400,1073741824 --rounds 4 --alone

# f: torch's DDP in the same rounds, over the same NCCL, which lets ranks share a GPU.
if [ "$BURN_DEVICE" = cuda ] && [ -n "${BURN_DDP_NCCL:-}" ]; then preload=(env "LD_PRELOAD=$BURN_DDP_NCCL"); else preload=(env); fi
for n in ${worlds//,/ }; do
  check f "torch-$n" 90 "torch" "${preload[@]}" ./burn-ddp-bench step --engine "$engine" --world $n --rounds 6 --python "$python"
done

# g: a rank that dies, stops or lags while NCCL's kernels run: the error, its delay, and the end of the kernels. Then in training.
export BURN_DDP_TIMEOUT=10 BURN_DDP_HEARTBEAT=0.5 BURN_DDP_PEER_TIMEOUT=5
for cause in kill stop lag; do check g "nccl-$cause" 45 "the device is idle" ./run.sh ranks 2 ./nccl_check --fault $cause; done
check g train-kill 45 "^error after .*: rank 1 " bash -c './run.sh ranks 2 ./rank kill; [ $? = 1 ]'
check g train-stop 45 "^ERROR [0-9]+ rank 1 " bash -c './rank fault 2 1 backward stop; [ $? != 0 ]'
export BURN_DDP_TIMEOUT=60
unset BURN_DDP_HEARTBEAT BURN_DDP_PEER_TIMEOUT
suite g train-more 90 processes::a_dead processes::a_panic processes::models_that_differ

# h: whole trainings, one with a timeline.
check h timeline 90 "rank 0\] +[0-9]+ +[0-9]|buckets in" bash -c 'rm -f out/timeline.json
  ./burnrun -n 2 --timeline out/timeline.json ./mnist --epochs 1 --summary out/mnist.json &&
  echo "buckets in the timeline: $(grep -o "\"bucket [0-9]*\"" out/timeline.json | wc -l)"'
check h gpt 90 "rank 0\] +[0-9]+ +[0-9]" ./burnrun -n 2 ./gpt --shard --epochs 1 --summary out/gpt.json
check h resnet 90 "rank 0\] +[0-9]+ +[0-9]" ./burnrun -n 2 ./resnet --data synthetic --epochs 1 --summary out/resnet.json

{
  printf '%s\n\n' "${shown[@]}"
  printf '%-5s%-15s%-24s%-7s%s\n' step what result time "last result"
  failed=0
  for row in "${rows[@]}"; do
    IFS='|' read -r step name result time last <<<"$row"
    printf '%-5s%-15s%-24s%-7s%s\n' "$step" "$name" "$result" "$time" "$last"
    [ "$result" = ok ] || failed=$((failed + 1))
  done
  echo "$failed of ${#rows[@]} failed or were skipped, after $SECONDS s, on $(sed -n 3p out/machine.txt)"
} | tee out/table.txt
tar -czf out.tar.gz out
tail -n 1 out/table.txt | grep -q '^0 of'
