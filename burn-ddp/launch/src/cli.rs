//! The command line of `burnrun`.

use std::ffi::OsString;
use std::time::Duration;

use burn_ddp_launch::{Launcher, Stdio, available_cores};
use clap::builder::styling::{AnsiColor, Styles};
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser, ValueEnum};

/// Starts several copies (ranks) of a training program on this machine and watches them.
///
/// The ranks find each other by themselves; no port is chosen, and any number of jobs can run side by side.
#[derive(Debug, Parser)]
#[command(name = "burnrun", version, styles = STYLES, max_term_width = 100, after_long_help = AFTER_HELP)]
#[command(after_help = "See --help for examples, the variables that each rank gets, and the exit codes.")]
#[command(override_usage = "burnrun [OPTIONS] [--] PROGRAM [ARGS]...")]
pub(crate) struct Cli {
    /// How many ranks to start: a number, or `auto` for one per processor core
    ///
    /// `auto` counts the cores that this process may use (container limits count); it does not look for GPUs yet.
    #[arg(short = 'n', long, alias = "nproc_per_node", value_name = "N|auto", env = "BURNRUN_NPROC_PER_NODE")]
    #[arg(default_value = "1", value_parser = parse_nproc, allow_negative_numbers = true)]
    nproc_per_node: usize,

    /// How long a rank that was told to stop may take before it is killed
    ///
    /// Counts from SIGTERM, after another rank has failed, or from the signal that burnrun was sent and passed on. A failed
    /// job's other ranks first get the same time, at most 3 s, to end with errors of their own.
    #[arg(long, value_name = "SECONDS", env = "BURNRUN_GRACE", default_value = "3", value_parser = parse_seconds)]
    #[arg(allow_negative_numbers = true)]
    grace: Duration,

    /// Where the ranks' output goes
    #[arg(long, value_name = "MODE", env = "BURNRUN_STDIO", default_value = "prefixed")]
    stdio: StdioMode,

    /// Run on this machine only; accepted for torchrun's sake, it is the only way there is
    #[arg(long, env = "BURNRUN_STANDALONE")]
    #[allow(dead_code, reason = "it changes nothing")]
    standalone: bool,

    /// The program that each rank runs, looked up as in a shell, and its arguments, passed on untouched
    // One list and not two arguments: between two, clap would look for options.
    #[arg(value_name = "PROGRAM [ARGS]", required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StdioMode {
    /// Every line to burnrun's stdout or stderr, behind `[rank 0] `
    Prefixed,
    /// Every line, without the prefix
    Plain,
    /// Rank 0 keeps the terminal (progress bars, input); the others as in `prefixed`
    FirstRankInherits,
}

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

const AFTER_HELP: &str = "\
Examples:
  burnrun -n 4 ./target/release/train --epochs 10   four ranks
  burnrun -n auto --grace 30 ./train                one per core, 30 s to stop
  burnrun -n 2 --stdio first-rank-inherits ./train  with rank 0's progress bar
  burnrun -n 2 sh -c 'echo $RANK of $WORLD_SIZE'    see what a rank sees

Each rank gets, besides the caller's environment:
  BURN_DDP_RANK, BURN_DDP_WORLD_SIZE                number from 0; how many
  BURN_DDP_LOCAL_RANK, BURN_DDP_LOCAL_WORLD_SIZE    the same on this machine
  BURN_DDP_NODE_RANK                                number of this machine: 0
  BURN_DDP_MASTER, BURN_DDP_STORE, BURN_DDP_JOB_ID  where to meet: at burnrun's
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,   the same with torchrun's
    GROUP_RANK, MASTER_ADDR, MASTER_PORT            names
  RAYON_NUM_THREADS, OMP_NUM_THREADS                cores / ranks, unless set

Stopping:
  The first rank that fails ends the job: the others get up to 3 s to end by
  themselves, then SIGTERM, then SIGKILL. Ctrl-C, SIGTERM and SIGHUP go to all
  ranks; a second Ctrl-C kills them. What the ranks started ends with them.
  Stdin is /dev/null, except for rank 0 with --stdio first-rank-inherits.

Exit code:
  0              every rank succeeded
  the rank's     of the first rank that failed; 128 + signal if a signal killed
                 it (137: SIGKILL, 139: SIGSEGV)
  130, 143, 129  stopped by SIGINT (Ctrl-C), SIGTERM, SIGHUP
  2              wrong usage
  126, 127       the program cannot be executed, or was not found
  1              the job could not be started for another reason";

impl Cli {
    /// Reads the command line and the environment; on wrong input, and for `--help`, prints and exits.
    pub(crate) fn read() -> Self {
        Self::try_parse().unwrap_or_else(|error| {
            let _ = error.print();
            if let Some((variable, value)) = culprit(&error) {
                eprintln!("\nnote: the value comes from the environment: {variable}={value}");
            }
            std::process::exit(error.exit_code());
        })
    }

    pub(crate) fn launcher(self) -> Launcher {
        let stdio = match self.stdio {
            StdioMode::Prefixed => Stdio::Prefixed,
            StdioMode::Plain => Stdio::Plain,
            StdioMode::FirstRankInherits => Stdio::FirstRankInherits,
        };
        let mut words = self.program.into_iter();
        let program = words.next().unwrap_or_default();
        Launcher::new(program, words).nproc(self.nproc_per_node).grace(self.grace).stdio(stdio)
    }
}

/// The environment variable that a value was wrong in: clap's message names only the flag.
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

fn parse_nproc(text: &str) -> Result<usize, String> {
    match text {
        "auto" => Ok(available_cores()),
        _ => match text.parse() {
            Ok(0) => Err("a job has at least one rank".into()),
            Ok(ranks) => Ok(ranks),
            Err(_) => Err("expected a number, or `auto`".into()),
        },
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "expected a number of seconds, 0 or more, such as 10 or 0.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
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
            "burnrun --no-such-flag train",
        ] {
            assert_eq!(parse(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }
}
