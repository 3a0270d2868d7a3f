#!/usr/bin/env bash
# Tests run.sh with programs that succeed, fail, say nothing and hang: its table, time limits, exit code and archive. Needs no GPU.
set -euo pipefail
cd "$(dirname "$0")"
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cp run.sh "$dir/"
cat >"$dir/burn-ddp-gpu-kit" <<'FAKE'
#!/usr/bin/env bash
case "$(basename "$0") $*" in
  "burnrun devices") echo "one | device" ;;
  "burnrun -n 1 "*) echo "rank 0: 121 reductions are right" ;;
  "burnrun -n 2 ./nccl_check"*) ;;
  "burnrun -n 4 ./nccl_check"*) echo $$ >hanging; exec sleep 1000 ;;
  "burn-ddp-bench step "*) echo "| 1 | burn-ddp |"; echo "Error: no world" >&2; exit 3 ;;
  "burn-ddp-gpu-kit "*processes*) echo "test result: ok. 1 passed" ;;
  "burn-ddp-gpu-kit "*gradients*) echo "test gradients::one ... FAILED"; exit 101 ;;
  "nccl_check "*) echo "rank $RANK of $WORLD_SIZE: the device is idle"; [ "$RANK" = 0 ] || exec sleep 1000 ;;
  *) exit 9 ;;
esac
FAKE
chmod +x "$dir/burn-ddp-gpu-kit"
cd "$dir"

expect() { # a line of the table, by its beginning
  grep -qE "^$1" out/table.txt || { echo "no line '$1' in the table:"; cat out/table.txt; exit 1; }
}
code=0
KIT_CHECK_SECONDS=10 BURN_DEVICE=flex ./run.sh a b >printed.txt || code=$?
[ $code = 1 ] || { echo "exit code $code"; exit 1; }
expect 'a    devices +ok +[0-9]+ s +one \| device$'
expect 'a    nccl-1 +ok +[0-9]+ s +rank 0: 121 reductions are right'
expect 'a    train-1 +FAILED: exit code 3 '
expect 'b    nccl-2 +FAILED: no result '
expect 'b    nccl-4 +FAILED: over 10 s '
expect 'b    processes +ok +[0-9]+ s +test result: ok'
expect 'b    gradients +FAILED: exit code 101 '
expect 'test gradients::one ... FAILED'
expect 'Error: no world'
expect '4 of 7 failed or were skipped'
if kill -0 "$(cat hanging)" 2>/dev/null; then echo "a program is left running"; exit 1; fi
tar -tzf out.tar.gz out/nccl-4.txt >/dev/null

KIT_SECONDS=0 ./run.sh d >printed.txt && { echo "skipped checks are no success"; exit 1; }
expect 'd    all-reduce-1 +skipped: no time'

# Ranks without a launcher: the end of rank 0 ends all.
timeout 60 ./run.sh ranks 2 ./nccl_check --fault kill >printed.txt 2>&1
grep -q "rank 0 of 2: the device is idle" printed.txt
echo "run.sh: ok"
