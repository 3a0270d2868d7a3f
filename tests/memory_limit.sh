#!/bin/bash
# `gpt` in control groups that limit the memory of each of four ranks to two thirds of what parameters, gradients and Adam's state
# take: it trains with --shard, and without --shard it is killed.
# Usage: memory_limit.sh [FOLDER OF gpt AND burnrun, target/debug [MIB PER RANK, 390]]; needs root and a memory controller
# of control groups, v1 or v2.
set -u
bin=$(realpath "${1:-$(dirname "$0")/../target/debug}")
work=$(mktemp -d)
# 146 MiB of parameters: 585 MiB with gradients and two moments.
model="--layers 3 --width 1024 --heads 8 --context 16 --batch-size 8 --epochs 1 --sample 4"
limit=$((${2:-390} << 20))

if [ -w /sys/fs/cgroup/memory ]; then
    groups=/sys/fs/cgroup/memory/burn-ddp-$$ file=memory.limit_in_bytes
elif grep -qw memory /sys/fs/cgroup/cgroup.subtree_control 2>/dev/null; then
    groups=/sys/fs/cgroup/burn-ddp-$$ file=memory.max
else
    echo "needs root and a control group for memory" >&2
    exit 1
fi
mkdir "$groups" || exit 1
[ "$file" = memory.limit_in_bytes ] || echo +memory >"$groups/cgroup.subtree_control"
trap 'rmdir "$groups"/*/ "$groups" 2>/dev/null; rm -rf "$work"' EXIT

head -c 3000 "$(dirname "$0")/../README.md" >"$work/text"
cat >"$work/rank" <<END
#!/bin/bash
mkdir -p "$groups/\$RANK" && echo $limit >"$groups/\$RANK/$file" && echo \$\$ >"$groups/\$RANK/cgroup.procs" || exit 1
exec "$bin/gpt" --text "$work/text" $model "\$@"
END
chmod +x "$work/rank"

"$bin/burnrun" -n 4 "$work/rank" --shard >"$work/out" 2>&1
sharded=$?
grep -E "parameters|bytes/s|Error|killed" "$work/out" | cut -c 1-200
"$bin/burnrun" -n 4 "$work/rank" >"$work/out" 2>&1
whole=$?
grep -E "Error|killed" "$work/out" | cut -c 1-200
if [ $sharded = 0 ] && [ $whole = 137 ]; then
    echo "ok: trained with --shard, killed without"
else
    echo "failed: exit codes $sharded with --shard, which should be 0, and $whole without, which should be 137" >&2
    exit 1
fi
