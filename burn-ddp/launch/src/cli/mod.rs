//! The program `burnrun`: runs the sub-command that the command line names, or launches a job.

mod devices;
mod doctor;
mod help;
mod host_options;
mod next_node_command;
mod options;
mod remote_command;
mod report;
mod seconds;
mod secret;
mod start_on_hosts;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use burn_ddp_launch::{BindTo, LaunchError, Launcher, Stdio};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser};

use options::{BindMode, Cli, StdioMode};

/// Runs the command that the command line names; returns the exit code.
pub(crate) fn main() -> i32 {
    let words: Vec<OsString> = std::env::args_os().collect();
    match words.get(1).and_then(|word| word.to_str()) {
        Some("devices") => devices::main(&words[1..]),
        Some("doctor") => doctor::main(&words[1..]),
        Some("remote") if words.len() == 2 => remote_command::main(),
        Some("report") => report::main(&words[1..]),
        Some("secret") => secret::main(&words[1..]),
        _ => run(&words),
    }
}

fn run(words: &[OsString]) -> i32 {
    let read = Cli::read(words);
    let launched = if read.cli.hosts.are_given() {
        start_on_hosts::fan_out(&read.matches, &read.cli).and_then(|job| job.run())
    } else {
        let invitation = next_node_command::invitation(&read.matches, &read.cli);
        let launcher = read.launcher().map(|launcher| launcher.invitation(invitation));
        launcher.and_then(|launcher| launcher.run()).map(|outcome| (outcome.to_string(), outcome.exit_code))
    };
    let (report, code) = launched.unwrap_or_else(|error| (error.to_string(), error.exit_code()));
    say(&report);
    code
}

/// Prints each line to stderr behind `burnrun: `. Errors are ignored: without a reader, the exit code must suffice.
fn say(text: &str) {
    let lines: String = text.lines().map(|line| format!("burnrun: {line}\n")).collect();
    let _ = std::io::Write::write_all(&mut std::io::stderr(), lines.as_bytes());
}

/// Parses the command line of a sub-command; on wrong input, and for `--help`, prints and exits.
fn parse<T: Parser>(words: &[OsString]) -> T {
    T::try_parse_from(words).unwrap_or_else(|error| error.exit())
}

impl Cli {
    /// Reads the command line and the environment.
    fn try_read(words: &[OsString]) -> Result<Read, clap::Error> {
        let matches = Cli::command().try_get_matches_from(words)?;
        let cli = Cli::from_arg_matches(&matches)?;
        Ok(Read { cli, matches })
    }

    /// As [`try_read`](Self::try_read); on wrong input, and for `--help`, prints and exits.
    fn read(words: &[OsString]) -> Read {
        Cli::try_read(words).unwrap_or_else(|mut error| {
            let unknown = error.kind() == ErrorKind::UnknownArgument;
            // clap suggests to write `--` before the option, which would make the option the program.
            error.remove(ContextKind::Suggested);
            let _ = error.print();
            if unknown {
                eprintln!("\nnote: options of the program come after the program: burnrun [OPTIONS] PROGRAM [ARGS]...");
            }
            if let Some((variable, value)) = culprit(&error) {
                eprintln!("\nnote: the value comes from the environment: {variable}={value}");
            }
            std::process::exit(error.exit_code());
        })
    }
}

/// A parsed command line, with clap's matches, which know where each value came from.
struct Read {
    cli: Cli,
    matches: clap::ArgMatches,
}

impl Read {
    fn launcher(self) -> Result<Launcher, LaunchError> {
        let cli = self.cli;
        let (master, leaves) = (cli.master()?, cli.leaves()?);
        let stdio = match cli.stdio {
            StdioMode::Prefixed => Stdio::Prefixed,
            StdioMode::Plain => Stdio::Plain,
            StdioMode::FirstRankInherits => Stdio::FirstRankInherits,
        };
        let bind_to = match cli.bind_to {
            BindMode::Core => BindTo::Core,
            BindMode::Numa => BindTo::Numa,
            BindMode::None => BindTo::None,
        };
        let mut words = cli.program.into_iter();
        let program = words.next().unwrap_or_default();
        let mut launcher = Launcher::new(program, words)
            .nproc(cli.nproc_per_node)
            .grace(cli.grace)
            .preempt_grace(cli.preempt_grace)
            .preempt_exit_code(cli.preempt_exit_code)
            .stdio(stdio)
            .max_restarts(cli.max_restarts)
            .meeting_id(cli.rdzv_id)
            .notices(say)
            .adopt_orphans();
        if let Some((host, port)) = master {
            launcher = launcher.nodes(cli.nnodes, host, port);
        }
        let secret_file = cli.secret_file.or_else(|| std::env::var_os("BURN_DDP_SECRET_FILE").map(PathBuf::from));
        for (given, apply) in [
            (cli.join_timeout, Launcher::join_timeout as fn(Launcher, Duration) -> Launcher),
            (cli.peer_timeout, Launcher::peer_timeout),
            (cli.timeout, |launcher, time| launcher.env("BURN_DDP_TIMEOUT", time.as_secs_f64().to_string())),
            (cli.heartbeat, |launcher, time| launcher.env("BURN_DDP_HEARTBEAT", time.as_secs_f64().to_string())),
        ] {
            launcher = given.into_iter().fold(launcher, apply);
        }
        launcher = launcher.bind_to(bind_to);
        launcher = leaves
            .into_iter()
            .fold(launcher, |launcher, count| launcher.env("BURN_DDP_LOGICAL_RANKS", count.to_string()));
        launcher = cli.preempt_signal.into_iter().fold(launcher, Launcher::preempt_signal);
        launcher = if cli.restart_preempted { launcher.restart_preempted() } else { launcher };
        launcher = if cli.encrypt { launcher.env("BURN_DDP_ENCRYPT", "data") } else { launcher };
        launcher = cli.interface.into_iter().fold(launcher, |launcher, name| launcher.env("BURN_DDP_INTERFACE", name));
        launcher = secret_file.into_iter().fold(launcher, Launcher::secret_file);
        launcher = cli.timeline.into_iter().fold(launcher, Launcher::timeline);
        launcher = cli.log_dir.into_iter().fold(launcher, Launcher::log_dir);
        launcher = cli.redirects.into_iter().fold(launcher, Launcher::redirects);
        launcher = cli.tee.into_iter().fold(launcher, Launcher::tee);
        launcher = cli.node_rank.into_iter().fold(launcher, Launcher::node_rank);
        Ok(cli.local_ranks_filter.into_iter().fold(launcher, Launcher::local_ranks_filter))
    }
}

/// The environment variable that holds a wrong value, and the value. clap's message names only the flag.
fn culprit(error: &clap::Error) -> Option<(String, String)> {
    let (ContextValue::String(flag), ContextValue::String(value)) =
        (error.get(ContextKind::InvalidArg)?, error.get(ContextKind::InvalidValue)?)
    else {
        return None;
    };
    let mut command = Cli::command();
    command.build();
    let argument = command.get_arguments().find(|argument| argument.to_string() == *flag)?;
    let variable = argument.get_env()?.to_str()?;
    let given = |name: String| std::env::args().any(|given| given == name || given.starts_with(&format!("{name}=")));
    let on_command_line = argument.get_long().is_some_and(|long| given(format!("--{long}")))
        || argument
            .get_short()
            .is_some_and(|short| std::env::args().any(|given| given.starts_with(&format!("-{short}"))));
    (!on_command_line && std::env::var(variable).is_ok_and(|set| set == *value))
        .then(|| (variable.to_owned(), value.clone()))
}
