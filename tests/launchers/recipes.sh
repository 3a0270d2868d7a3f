#!/bin/bash
# The recipes in docs/recipes: checked by bash, shellcheck and the schemas of Kubernetes, then run on two "machines", with
# stand-ins for Slurm's and Kubernetes' parts. Usage: recipes.sh [PROGRAM [BURNRUN]]; needs root, ip, unshare, shellcheck,
# python3 with venv, and PyPI for the first run.
. "$(dirname "$0")/common.sh"
find_burnrun "${2:-}"
installed shellcheck "apt-get install shellcheck"
recipes=$root/docs/recipes
python=${CARGO_TARGET_DIR:-$root/target}/python
python3 -m venv "$python" && "$python/bin/pip" install -q kubernetes-validate==1.37.0 pyyaml || exit 1

job "the batch file's syntax" bash -n "$recipes/slurm.sbatch"
succeeded
job "the batch file's words" shellcheck "$recipes/slurm.sbatch"
succeeded
job "Kubernetes' schemas" "$python/bin/kubernetes-validate" --strict "$recipes/kubernetes.yaml"
succeeded
job "a wrong field" bash -c "sed s/completions:/complete:/ $recipes/kubernetes.yaml >/tmp/wrong.$$.yaml;
    $python/bin/kubernetes-validate --strict /tmp/wrong.$$.yaml; code=\$?; rm /tmp/wrong.$$.yaml; exit \$code"
failed

machines_possible || { echo "the rest needs root, ip and unshare" >&2; finish; }
machines_up || exit 1
new_secret
dir=/tmp/$pair
ln -s "$burnrun" "$dir/burnrun"

# Slurm: srun starts a task on each machine.
cat >"$dir/scontrol" <<'END'
#!/bin/sh
[ "$*" = "show hostnames m[1-2]" ] && printf 'm1\nm2\n'
[ "$1" = requeue ] && echo "queued again: $2"
exit 0
END
cat >"$dir/srun" <<END
#!/bin/bash
while [ "\${1#-}" != "\$1" ]; do shift; done
for m in 1 2; do $at m\$m env SLURM_PROCID=\$((m - 1)) "\$@" & pids+=(\$!); done
for pid in \${pids[@]}; do wait \$pid || result=\$?; done
exit \${result:-0}
END
chmod +x "$dir/scontrol" "$dir/srun"
cd "$dir" || exit 1
job "the batch file" env PATH="$dir:$PATH" SLURM_JOB_ID=4711 SLURM_NNODES=2 "SLURM_JOB_NODELIST=m[1-2]" RANKS_PER_NODE=2 \
    bash "$recipes/slurm.sbatch" "$hello" --steps 20
all_done 4 burnrun

after 3 pkill -o -TERM -f "^burnrun --nnodes 2"
job "the batch file, asked to stop" env PATH="$dir:$PATH" SLURM_JOB_ID=4712 SLURM_NNODES=2 "SLURM_JOB_NODELIST=m[1-2]" \
    RANKS_PER_NODE=2 bash "$recipes/slurm.sbatch" "$hello" --steps 3000 --pause 10
[ "$code" = 75 ] || wrong "the exit code is $code"
said "queued again: 4712" 1
no_rank_is_left

# Kubernetes and Kubeflow: two pods with the variables and the command of the recipe; the name of the first pod resolves late.
cat >"$dir/pod.py" <<'END'
import os, sys, yaml
path, index, program = sys.argv[1], sys.argv[2], sys.argv[3:]
kind = list(yaml.safe_load_all(open(path)))[-1]
spec = kind["spec"]
if kind["kind"] == "Job":
    pod, own = spec["template"]["spec"], {}
else:
    replicas = spec["pytorchReplicaSpecs"]
    pod = replicas["Worker" if int(index) else "Master"]["template"]["spec"]
    own = {"RANK": index, "WORLD_SIZE": "2", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
(container,) = pod["containers"]
for variable in container["env"]:
    index_of = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    if "valueFrom" in variable:
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == index_of
        own[variable["name"]] = index
words = [word.replace("-n auto", "-n 2").replace("./train --resume", " ".join(program)) for word in container["command"] + container["args"]]
if "./train" in words:
    at = words.index("./train")
    words = ["2" if word == "auto" else word for word in words[:at]] + program
os.execvpe(words[0], words, {**os.environ, **own})
END
pods() {
    cat >"$dir/pods" <<END
#!/bin/bash
for m in 1 2; do $at m\$m $python/bin/python $dir/pod.py $1 \$((m - 1)) $hello --steps 20 & pids+=(\$!); done
for pid in \${pids[@]}; do wait \$pid || result=\$?; done
exit \${result:-0}
END
    chmod +x "$dir/pods"
}
named() { for n in 1 2; do echo "10.77.0.1 $1" >>"/etc/netns/$pair-$n/hosts"; done; }

pods "$recipes/kubernetes.yaml"
after 4 named train-0.train
job "two pods of a Job" env PATH="$dir:$PATH" "$dir/pods"
all_done 4 burnrun
said "for an address of train-0.train" 1

pods "$recipes/pytorchjob.yaml"
named train-master-0
job "two pods of a PyTorchJob" env PATH="$dir:$PATH" "$dir/pods"
all_done 4 burnrun
finish
