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
Other commands (a program of such a name: burnrun -- devices):
  burnrun devices [--json]   the GPUs of this machine
  burnrun doctor [--json]    checks what a job needs here, and says the fix
  burnrun report DIR         (re)builds and prints the report of a log directory
  burnrun secret FILE        makes the secret that machines of one job share

Examples:
  burnrun -n 4 ./target/release/train --epochs 10   four ranks
  burnrun -n auto --grace 30 ./train                one per GPU or core, 30 s to stop
  burnrun -n 2 --stdio first-rank-inherits ./train  with rank 0's progress bar
  burnrun -n 8 --log-dir logs --local-ranks-filter 0 ./train
                                                    all output in logs/latest, rank 0's shown
  burnrun -n 2 --timeline trace.json ./train        what each rank does, for ui.perfetto.dev
  burnrun -n 4 --max-restarts 3 ./train --resume    up to three new starts after a failure
  burnrun -n 2 sh -c 'echo $RANK of $WORLD_SIZE'    see what a rank sees
  burnrun --host node1:4,node2:4 ./train            on two machines, by ssh
Two machines, once `burnrun secret ~/job.secret` was run and the file copied to both:
  burnrun --nnodes 2 --node-rank 0 --master-addr node0 --secret-file ~/job.secret -n 4 ./train
  burnrun --nnodes 2 --node-rank 1 --master-addr node0 --secret-file ~/job.secret -n 4 ./train

Each option has a variable, shown as [env: …]; the command line wins.

Each rank gets, besides the caller's environment:
  BURN_DDP_RANK, BURN_DDP_WORLD_SIZE                number from 0; how many
  BURN_DDP_LOCAL_RANK, BURN_DDP_LOCAL_WORLD_SIZE    the same on this machine
  BURN_DDP_NODE_RANK                                number of this machine
  BURN_DDP_RESTART_COUNT                            how often the job was restarted
  BURN_DDP_MASTER, BURN_DDP_STORE, BURN_DDP_JOB_ID  where to meet: at burnrun's
  BURN_DDP_SECRET_FILE                              what proves that it belongs to the job
  BURN_DDP_EVENTS, BURN_DDP_REPORT_DIR              where to tell what went wrong
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,   the same with torchrun's
    GROUP_RANK, MASTER_ADDR, MASTER_PORT            names
  RAYON_NUM_THREADS, OMP_NUM_THREADS                cores / ranks, or cores of its own (--bind-to);
                                                    unless set
  MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_,   glibc keeps freed memory; unless one is set
    MALLOC_ARENA_MAX                                (set to nothing: glibc's defaults)

Stopping:
  The first rank that fails ends the job, on all machines: the others get up to
  3 s to end by themselves, then SIGTERM, then SIGKILL. Ctrl-C, SIGTERM and SIGHUP
  go to all ranks; a second Ctrl-C kills them. What the ranks started ends with
  them, also when burnrun itself is killed. Ctrl-Z stops the ranks and burnrun; `fg`
  lets them go on. Stdin is /dev/null, except with --stdio first-rank-inherits.

Exit code, the same on all machines:
  0              every rank succeeded
  the rank's     of the rank that failed first; 128 + signal if a signal killed
                 it (137: SIGKILL, 139: SIGSEGV)
  130, 143, 129  stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP
  2              wrong usage
  126, 127       the program cannot be executed, or was not found
  1              the job could not be started for another reason, or a machine was lost";
