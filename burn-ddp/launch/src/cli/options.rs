//! The options of `burnrun`, from the command line and from environment variables, each checked by itself.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use burn_ddp_comm::StopSignal;
use burn_ddp_launch::{LaunchError, Launcher, Streams, available_cores};
use clap::builder::BoolishValueParser;
use clap::{Parser, ValueEnum};

use super::host_options::HostOptions;
use super::seconds::{parse_positive_seconds, parse_seconds};
use super::{devices, help};

/// Starts the ranks of a data-parallel training program, watches them, and reports which rank failed first and why.
///
/// The ranks connect to each other without further settings. On one machine you choose no port, and any number of jobs
/// can run side by side. For several machines, start burnrun on each of them, or once with --host or --hostfile.
#[derive(Debug, Parser)]
#[command(name = "burnrun", version, styles = help::STYLES, max_term_width = 100, after_long_help = help::AFTER_HELP)]
#[command(
    after_help = "See --help for examples, other commands, the variables that each rank gets, and the exit codes."
)]
#[command(override_usage = help::USAGE, next_help_heading = "Ranks")]
pub(super) struct Cli {
    /// Number of ranks to start on this machine, or `auto` for one per GPU, or else one per processor core
    ///
    /// `auto` counts the GPUs that CUDA_VISIBLE_DEVICES allows, and the cores that this process may use (within the
    /// limits of its container). `gpu` counts only GPUs and fails if there is none, `cpu` only cores.
    #[arg(short = 'n', long, alias = "nproc_per_node", value_name = "N|auto", env = "BURNRUN_NPROC_PER_NODE")]
    #[arg(default_value = "1", value_parser = parse_nproc, allow_negative_numbers = true)]
    pub(super) nproc_per_node: usize,

    /// Micro-batches of a training step over all ranks
    ///
    /// A program that uses burn-ddp's loaders then trains the same bits on any number of ranks up to this one. Each
    /// rank makes its share of the micro-batches, one after the other.
    #[arg(long, alias = "logical_ranks", value_name = "COUNT", env = "BURNRUN_LOGICAL_RANKS")]
    pub(super) logical_ranks: Option<NonZeroUsize>,

    /// Cores to which each rank is bound: `core`, `numa`, `none`
    ///
    /// Ranks are bound to cores that burnrun may use (by taskset, schedulers and container limits) and to which no
    /// other burnrun on this machine has bound ranks. `none`: all ranks may run on all cores that burnrun may use.
    #[arg(long, alias = "bind_to", value_name = "WHAT", env = "BURNRUN_BIND_TO", default_value = "none")]
    pub(super) bind_to: BindMode,

    /// Number of times to start all ranks anew after one has failed
    ///
    /// The restart begins when all ranks on all machines have exited. The ranks find the number of restarts so far in
    /// BURN_DDP_RESTART_COUNT. There is no restart after Ctrl-C, after the loss of a machine, or if the program exits
    /// with 2, which means wrong usage.
    #[arg(long, alias = "max_restarts", value_name = "N", env = "BURNRUN_MAX_RESTARTS", default_value = "0")]
    pub(super) max_restarts: u32,

    /// Time that a rank has to end after the signal to end, before it is killed
    ///
    /// The signal to end is a signal to burnrun (Ctrl-C, SIGTERM, SIGHUP), which it passes on; after the failure of
    /// another rank it is SIGTERM. Before that SIGTERM, the ranks have the same time, but at most 3 s, to end with
    /// errors of their own.
    #[arg(long, value_name = "SECONDS", env = "BURNRUN_GRACE", default_value = "3", value_parser = parse_seconds)]
    #[arg(allow_negative_numbers = true)]
    pub(super) grace: Duration,

    /// Signal that asks the ranks to save and end, if any burnrun or rank of the job gets it [default: SIGTERM]
    ///
    /// A program of burn-ddp can stop once it looks for it (`ddp.stop_requested()`); in others SIGTERM ends the job as
    /// without this option. If the option is given, every program counts as one that can stop, and the exit code is
    /// that of --preempt-exit-code also while ranks start. A second signal ends the job at once.
    #[arg(long, alias = "preempt_signal", value_name = "SIGNAL", env = "BURN_DDP_PREEMPT_SIGNAL")]
    #[arg(help_heading = "Preemption")]
    pub(super) preempt_signal: Option<StopSignal>,

    /// Time that ranks have to save and end after that signal, before they are killed
    #[arg(long, alias = "preempt_grace", value_name = "SECONDS", env = "BURNRUN_PREEMPT_GRACE", default_value = "60")]
    #[arg(value_parser = parse_seconds, allow_negative_numbers = true, help_heading = "Preemption")]
    pub(super) preempt_grace: Duration,

    /// Exit code of burnrun if the job was ended by that signal
    #[arg(long, alias = "preempt_exit_code", value_name = "CODE", env = "BURNRUN_PREEMPT_EXIT_CODE")]
    #[arg(default_value_t = Launcher::DEFAULT_PREEMPT_EXIT_CODE, value_parser = clap::value_parser!(u8).range(3..))]
    #[arg(help_heading = "Preemption")]
    pub(super) preempt_exit_code: u8,

    /// Start all ranks anew after that signal, too, as often as --max-restarts says
    #[arg(long, alias = "restart_preempted", env = "BURNRUN_RESTART_PREEMPTED")]
    #[arg(value_parser = BoolishValueParser::new(), help_heading = "Preemption")]
    pub(super) restart_preempted: bool,

    /// Number of machines of the job; start burnrun with the same value on each of them
    ///
    /// burnrun on node 0 prints the command for the other machines. All need the same secret: `burnrun secret FILE`
    /// makes one.
    #[arg(long, value_name = "N", env = "BURNRUN_NNODES", default_value = "1", value_parser = parse_nnodes)]
    #[arg(help_heading = "Several machines", allow_negative_numbers = true)]
    pub(super) nnodes: usize,

    /// The number of this machine, from 0
    ///
    /// Without it, the machine that --master-addr names is 0, and the others are numbered as they arrive.
    #[arg(long, alias = "node_rank", value_name = "K", env = "BURNRUN_NODE_RANK", help_heading = "Several machines")]
    pub(super) node_rank: Option<usize>,

    /// Name or address of node 0, as the other machines know it
    #[arg(long, alias = "master_addr", value_name = "HOST", env = "BURNRUN_MASTER_ADDR")]
    #[arg(help_heading = "Several machines")]
    pub(super) master_addr: Option<String>,

    /// The port on which node 0's burnrun listens
    #[arg(long, alias = "master_port", value_name = "PORT", env = "BURNRUN_MASTER_PORT", default_value = "29500")]
    #[arg(help_heading = "Several machines", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) master_port: u16,

    /// Address and port of node 0's burnrun, instead of --master-addr and --master-port
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST[:PORT]", env = "BURNRUN_RDZV_ENDPOINT")]
    #[arg(help_heading = "Several machines", conflicts_with = "master_addr")]
    pub(super) rdzv_endpoint: Option<String>,

    /// Name of the job, the same on all machines; keeps apart jobs that use the same address by mistake
    ///
    /// Without it, jobs are told apart by program and arguments, which must then be the same on all machines.
    #[arg(long, alias = "rdzv_id", value_name = "NAME", env = "BURNRUN_RDZV_ID", default_value = "burnrun")]
    #[arg(help_heading = "Several machines")]
    pub(super) rdzv_id: String,

    /// Accepted so that command lines of torchrun work; has no effect
    #[arg(long, alias = "rdzv_backend", env = "BURNRUN_RDZV_BACKEND", value_parser = ["c10d", "static"], hide = true)]
    #[allow(dead_code, reason = "there is one kind of meeting")]
    pub(super) rdzv_backend: Option<String>,

    /// Run on this machine only, which is the default; an error together with more than one machine
    #[arg(long, env = "BURNRUN_STANDALONE", value_parser = BoolishValueParser::new())]
    #[arg(help_heading = "Several machines")]
    pub(super) standalone: bool,

    /// File with the job's secret, made by `burnrun secret FILE` and copied to every machine
    ///
    /// The variable BURN_DDP_SECRET_FILE can name the file too. Without a file, a job on one machine makes a secret
    /// that only its ranks get, and a job on several machines is refused. If you trust every user of the network,
    /// BURN_DDP_TRUST_NETWORK=1 allows such a job without a secret.
    #[arg(long, alias = "secret_file", value_name = "FILE", env = "BURNRUN_SECRET_FILE")]
    #[arg(help_heading = "Several machines")]
    pub(super) secret_file: Option<PathBuf>,

    #[command(flatten)]
    pub(super) hosts: HostOptions,

    /// Network interface, by name or address, on which ranks listen and from which they connect
    #[arg(long, value_name = "NAME", env = "BURNRUN_INTERFACE", help_heading = "Several machines")]
    pub(super) interface: Option<String>,

    /// Encrypt and authenticate the data (gradients, weights) that ranks send each other over sockets
    ///
    /// Must be the same on all machines. All other connections are always encrypted, and shared memory never is. It
    /// cannot be combined with MPI or, between machines, with NCCL. BURN_DDP_ENCRYPT=data has the same effect, also
    /// without burnrun.
    #[arg(long, env = "BURNRUN_ENCRYPT", value_parser = BoolishValueParser::new(), help_heading = "Several machines")]
    pub(super) encrypt: bool,

    /// Longest time until all machines, and then all ranks, have met [default: 300]
    #[arg(
        long,
        alias = "join_timeout",
        value_name = "SECONDS",
        env = "BURNRUN_JOIN_TIMEOUT",
        help_heading = "Waiting"
    )]
    #[arg(value_parser = parse_positive_seconds, allow_negative_numbers = true)]
    pub(super) join_timeout: Option<Duration>,

    /// Longest time for one collective [default: 600]
    #[arg(long, value_name = "SECONDS", env = "BURNRUN_TIMEOUT", help_heading = "Waiting")]
    #[arg(value_parser = parse_positive_seconds, allow_negative_numbers = true)]
    pub(super) timeout: Option<Duration>,

    /// Silence after which a rank or a machine counts as lost
    ///
    /// By default, a machine that cannot be reached is lost after 30 s, while a process that is silent on a reachable
    /// machine (stopped, or in a debugger) is lost only when a collective reaches --timeout. If this option is given,
    /// its value applies to both.
    #[arg(
        long,
        alias = "peer_timeout",
        value_name = "SECONDS",
        env = "BURNRUN_PEER_TIMEOUT",
        help_heading = "Waiting"
    )]
    #[arg(value_parser = parse_positive_seconds, allow_negative_numbers = true)]
    pub(super) peer_timeout: Option<Duration>,

    /// Interval at which each rank sends a sign of life to the others [default: 1]
    #[arg(long, value_name = "SECONDS", env = "BURNRUN_HEARTBEAT", help_heading = "Waiting")]
    #[arg(value_parser = parse_positive_seconds, allow_negative_numbers = true)]
    pub(super) heartbeat: Option<Duration>,

    /// Destination of the ranks' output on the console
    #[arg(long, value_name = "MODE", env = "BURNRUN_STDIO", default_value = "prefixed", help_heading = "Output")]
    pub(super) stdio: StdioMode,

    /// Store output, events and, after a failure, a report in a new directory below DIR
    ///
    /// DIR/latest links to the directory of the latest job. There, generation-0/rank-3.stderr.log holds the stderr of
    /// rank 3 until the first restart, and report.md explains the failure. The output of a rank that keeps the terminal
    /// (--stdio first-rank-inherits) is not stored.
    #[arg(long, alias = "log_dir", value_name = "DIR", env = "BURNRUN_LOG_DIR", help_heading = "Output")]
    pub(super) log_dir: Option<PathBuf>,

    /// Record a trace of all ranks in FILE, which ui.perfetto.dev and chrome://tracing open
    ///
    /// It shows steps, backward, buckets, waits, data loading, and collectives with their source lines. With several
    /// machines, each machine's FILE holds its own ranks, unless the machines share FILE's directory. The variable
    /// BURN_DDP_TIMELINE has the same effect, also without burnrun.
    #[arg(long, value_name = "FILE", env = "BURNRUN_TIMELINE", help_heading = "Output")]
    pub(super) timeline: Option<PathBuf>,

    /// Output that goes to the log directory and not to the console: 0 none, 1 stdout, 2 stderr, 3 both
    ///
    /// One number for all ranks, or a list by local rank, such as 0:3,1:2.
    #[arg(short = 'r', long, value_name = "STREAMS", env = "BURNRUN_REDIRECTS", help_heading = "Output")]
    pub(super) redirects: Option<Streams>,

    /// Output that goes to the log directory and to the console, as for --redirects
    ///
    /// With --log-dir, and neither --redirects nor --tee, all output goes to both.
    #[arg(short = 't', long, value_name = "STREAMS", env = "BURNRUN_TEE", help_heading = "Output")]
    pub(super) tee: Option<Streams>,

    /// Local ranks whose output the console shows, such as 0,2 [default: all]
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS", env = "BURNRUN_LOCAL_RANKS_FILTER")]
    #[arg(help_heading = "Output", value_delimiter = ',')]
    pub(super) local_ranks_filter: Option<Vec<usize>>,

    /// Accepted so that command lines of torchrun work; has no effect, since the program is never run by Python
    #[arg(long, alias = "no_python", hide = true)]
    #[allow(dead_code, reason = "there is no other way")]
    pub(super) no_python: bool,

    /// The program that each rank runs, looked up as in a shell, and its arguments, passed on unchanged
    // One list, since clap would look for options between two arguments.
    #[arg(value_name = "PROGRAM [ARGS]", required = true, trailing_var_arg = true)]
    pub(super) program: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum BindMode {
    /// Each rank to an equal share of the physical cores, or of the hardware threads if ranks outnumber cores
    Core,
    /// Each rank to the cores of one NUMA node, which several ranks may share
    Numa,
    /// Ranks are not bound
    None,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum StdioMode {
    /// Every line goes to burnrun's stdout or stderr, behind a prefix such as `[rank 0] `
    Prefixed,
    /// Every line goes there without the prefix
    Plain,
    /// This machine's first rank keeps the terminal (progress bars, input); the others are as in `prefixed`
    FirstRankInherits,
}

impl Cli {
    /// The number of logical ranks, as the ranks get it.
    ///
    /// # Errors
    /// [`LaunchError::Usage`] if there are more ranks.
    pub(super) fn leaves(&self) -> Result<Option<usize>, LaunchError> {
        let (count, nodes) = (self.logical_ranks.map(NonZeroUsize::get), self.nnodes);
        let ranks = self.nproc_per_node.saturating_mul(nodes);
        match count.filter(|count| *count < ranks) {
            Some(count) => Err(LaunchError::Usage(format!(
                "--logical-ranks {count} for {ranks} ranks: each rank makes one micro-batch of a step at least"
            ))),
            None => Ok(count),
        }
    }

    /// Address at which the machines meet; `None` for one machine.
    pub(super) fn master(&self) -> Result<Option<(String, u16)>, LaunchError> {
        let usage = |message: &str| Err(LaunchError::Usage(message.into()));
        let given = match (&self.rdzv_endpoint, &self.master_addr) {
            (Some(endpoint), _) => Some(split_endpoint(endpoint, self.master_port).map_err(LaunchError::Usage)?),
            (None, Some(host)) => Some((host.clone(), self.master_port)),
            (None, None) => None,
        };
        match (self.nnodes, given) {
            (1, _) if self.node_rank.is_some_and(|node| node > 0) => {
                usage("--node-rank is for several machines: give their number with --nnodes")
            }
            // The launcher of one machine has no other launcher to meet.
            (1, _) => Ok(None),
            _ if self.standalone => usage("--standalone is for one machine, but --nnodes asks for more"),
            (_, None) => usage(
                "several machines meet at node 0: give its address with --master-addr HOST (or --rdzv-endpoint \
                HOST:PORT), the same on all machines",
            ),
            (_, given) => Ok(given),
        }
    }
}

/// `host`, `host:port`, `[::1]:port`.
fn split_endpoint(text: &str, default_port: u16) -> Result<(String, u16), String> {
    let wrong = || format!("--rdzv-endpoint {text:?} is not of the form HOST or HOST:PORT, such as node0:29500");
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(wrong)?;
            (host, port.strip_prefix(':').or_else(|| port.is_empty().then_some("")).ok_or_else(wrong)?)
        }
        // An IPv6 address without brackets: its last part could be mistaken for a port.
        None if text.matches(':').count() > 1 => return Err(wrong()),
        None => text.split_once(':').unwrap_or((text, "")),
    };
    let port = if port.is_empty() { default_port } else { port.parse().map_err(|_| wrong())? };
    if host.is_empty() || port == 0 { Err(wrong()) } else { Ok((host.to_owned(), port)) }
}

fn parse_nproc(text: &str) -> Result<usize, String> {
    match text {
        "auto" => Ok(devices::visible_count().filter(|gpus| *gpus > 0).unwrap_or_else(available_cores)),
        "cpu" => Ok(available_cores()),
        "gpu" => devices::visible_count()
            .filter(|gpus| *gpus > 0)
            .ok_or_else(|| "there is no GPU here; see `burnrun devices`".to_owned()),
        _ => match text.parse() {
            Ok(0) => Err("a job has at least one rank".into()),
            Ok(ranks) => Ok(ranks),
            Err(_) => Err("expected a number, or `auto`".into()),
        },
    }
}

fn parse_nnodes(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("a job has at least one machine".into()),
        Ok(nodes) => Ok(nodes),
        Err(_) if text.contains(':') => {
            Err("a number of machines that changes (MIN:MAX) is not supported yet; give one number".into())
        }
        Err(_) => Err("expected a number".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_variable() {
        let without: Vec<_> = Cli::command()
            .get_arguments()
            .filter(|argument| argument.get_long().is_some() && !argument.is_hide_set() && argument.get_env().is_none())
            .map(|argument| argument.get_id().to_string())
            .collect();
        assert_eq!(without, [""; 0]);
    }

    #[test]
    fn everything_after_the_program_is_passed_on_untouched() {
        for (line, args) in [
            ("burnrun -n 3 train -n 8 --grace x --help", "-n 8 --grace x --help"),
            ("burnrun -n 3 -- train -- --standalone", "-- --standalone"),
            ("burnrun -n 3 train -- -n 5", "-- -n 5"),
            ("burnrun -n3 train x -- y -- z", "x -- y -- z"),
        ] {
            let cli = parse(line).unwrap();
            assert_eq!(cli.nproc_per_node, 3, "{line}");
            assert_eq!(cli.program[0], "train", "{line}");
            assert_eq!(cli.program[1..].join(" ".as_ref()), args, "{line}");
        }
    }

    #[test]
    fn wrong_input_is_refused() {
        for line in [
            "burnrun",
            "burnrun -n 0 train",
            "burnrun -n -1 train",
            "burnrun -n many train",
            "burnrun --grace -1 train",
            "burnrun --grace nan train",
            "burnrun --stdio loud train",
            "burnrun --bind-to socket train",
            "burnrun --no-such-flag train",
            "burnrun --nnodes 0 train",
            "burnrun --nnodes 1:4 train",
            "burnrun --master-port 0 train",
            "burnrun --master-addr a --rdzv-endpoint b train",
            "burnrun --tee 4 train",
            "burnrun --local-ranks-filter a train",
            "burnrun --timeout 0 train",
            "burnrun --max-restarts -1 train",
            "burnrun --preempt-signal SIGINT train",
            "burnrun --preempt-exit-code 2 train",
            "burnrun --preempt-exit-code 256 train",
        ] {
            assert_eq!(parse(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn machines_meet_where_one_says() {
        for (line, expected) in [
            ("burnrun train", Ok(None)),
            ("burnrun --standalone --nnodes 1 train", Ok(None)),
            ("burnrun --nnodes 2 --master-addr a train", Ok(Some(("a", 29500)))),
            ("burnrun --nnodes 2 --master_addr a --master_port 7 train", Ok(Some(("a", 7)))),
            ("burnrun --nnodes 2 --rdzv-endpoint a:8 train", Ok(Some(("a", 8)))),
            ("burnrun --nnodes 2 --rdzv-endpoint a train", Ok(Some(("a", 29500)))),
            ("burnrun --nnodes 2 --rdzv-endpoint [::1]:8 train", Ok(Some(("::1", 8)))),
            ("burnrun --nnodes 2 --rdzv-endpoint ::1:8 train", Err("HOST:PORT")),
            ("burnrun --nnodes 2 --rdzv-endpoint a:b train", Err("HOST:PORT")),
            ("burnrun --nnodes 2 train", Err("--master-addr")),
            ("burnrun --nnodes 2 --standalone --master-addr a train", Err("--standalone")),
            ("burnrun --node-rank 1 train", Err("--nnodes")),
        ] {
            match (parse(line).unwrap().master(), expected) {
                (Ok(found), Ok(expected)) => {
                    assert_eq!(found.as_ref().map(|(host, port)| (&host[..], *port)), expected, "{line}");
                }
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{line}: {error}"),
                (found, _) => panic!("{line}: {found:?}"),
            }
        }
    }
}
