//! The longer texts of `burnrun --help`.

use clap::builder::styling::{AnsiColor, Styles};

pub(super) const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

pub(super) const USAGE: &str = "\
burnrun [OPTIONS] [--] PROGRAM [ARGS]...
       burnrun devices|doctor|report|secret [--help]";

pub(super) const AFTER_HELP: &str = "\
Other commands (to start a program with the same name: burnrun -- devices):
  burnrun devices [--json]   lists the GPUs of this machine
  burnrun doctor [--json]    checks whether this machine can run jobs, and says how to fix it
  burnrun report DIR         (re)builds and prints the report of a job from its log directory
  burnrun secret FILE        makes the secret that the machines of one job share

Examples:
  burnrun -n 4 ./target/release/train --epochs 10   four ranks
  burnrun -n auto --grace 30 ./train                one rank per GPU or core, 30 s to stop
  burnrun -n 2 --stdio first-rank-inherits ./train  shows the progress bar of rank 0
  burnrun -n 8 --log-dir logs --local-ranks-filter 0 ./train
                                                    all output in logs/latest, only rank 0's shown
  burnrun -n 2 --timeline trace.json ./train        a trace of all ranks, for ui.perfetto.dev
  burnrun -n 4 --max-restarts 3 ./train --resume    up to three restarts after failures
  burnrun -n 2 sh -c 'echo $RANK of $WORLD_SIZE'    prints the variables of each rank
  burnrun --host node1:4,node2:4 ./train            on two machines, by ssh
Two machines, after `burnrun secret ~/job.secret` on one and a copy of the file to the other:
  burnrun --nnodes 2 --node-rank 0 --master-addr node0 --secret-file ~/job.secret -n 4 ./train
  burnrun --nnodes 2 --node-rank 1 --master-addr node0 --secret-file ~/job.secret -n 4 ./train

Each option can also be set by the environment variable shown as [env: …]; the option on the
command line takes precedence.

Environment variables of each rank, in addition to burnrun's own:
  BURN_DDP_RANK, BURN_DDP_WORLD_SIZE                number of the rank, from 0; number of ranks
  BURN_DDP_LOCAL_RANK, BURN_DDP_LOCAL_WORLD_SIZE    the same among the ranks of this machine
  BURN_DDP_NODE_RANK                                number of this machine, from 0
  BURN_DDP_RESTART_COUNT                            number of restarts of the job so far
  BURN_DDP_MASTER, BURN_DDP_STORE, BURN_DDP_JOB_ID  burnrun's store, where ranks meet; id of the job
  BURN_DDP_SECRET_FILE                              the secret that admits the rank to the job
  BURN_DDP_EVENTS, BURN_DDP_REPORT_DIR              file and directory for the rank's failures
  BURN_DDP_PREEMPT_SIGNAL                           --preempt-signal, if it is given
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,   the same under torchrun's names
    GROUP_RANK, MASTER_ADDR, MASTER_PORT
  RAYON_NUM_THREADS, OMP_NUM_THREADS                cores of the rank: all / ranks, or its own with
                                                    --bind-to; not changed if already set
  MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_,   make glibc keep freed memory; not changed if one
    MALLOC_ARENA_MAX                                is set (set one to '' for glibc's defaults)

Stopping:
  The first rank that fails ends the job on all machines: the other ranks have up to
  3 s to end by themselves, then get SIGTERM, and SIGKILL after the grace time. Ctrl-C,
  SIGTERM, SIGHUP, SIGQUIT, SIGALRM and SIGXCPU are passed on to all ranks and end the
  job; a second Ctrl-C kills them. SIGUSR1 and SIGUSR2 are passed on alone. After SIGTERM,
  or the signal of --preempt-signal, ranks that can save have 60 s to do so. Processes
  that the ranks have started end with them, also if burnrun itself is killed. Ctrl-Z
  stops the ranks and burnrun until `fg`. The ranks' stdin is /dev/null, except with
  --stdio first-rank-inherits.

Exit code, the same on all machines:
  0              every rank succeeded
  the rank's     exit code of the rank that failed first; 128 + signal if a signal
                 killed it (137: SIGKILL, 139: SIGSEGV)
  130, 143, 129  stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP; 128 + signal for others
  75             the ranks have saved and stopped after SIGTERM or --preempt-signal
                 (see --preempt-exit-code)
  2              wrong usage
  126, 127       the program cannot be executed, or was not found
  1              the job could not be started for another reason, or a machine was lost";
