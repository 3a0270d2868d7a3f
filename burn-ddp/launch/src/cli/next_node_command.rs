//! The command line for the other machines of a job.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory};

use super::options::Cli;

/// Arguments that are not copied into the options of the other machines.
const OWN: [&str; 2] = ["node_rank", "program"];

/// Notice of node 0 with the command to run on the other machines.
pub(super) fn invitation(matches: &ArgMatches, cli: &Cli) -> String {
    let numbered = cli.node_rank.is_some();
    let has_file = cli.secret_file.is_some() || std::env::var_os("BURN_DDP_SECRET_FILE").is_some();
    let copy = if has_file { ", with a copy of the secret file," } else { "" };
    match (cli.nnodes, numbered) {
        (2, true) => format!("on the other machine{copy} run: {}", command(matches, cli, Some(1))),
        (n, true) => {
            let last = n.saturating_sub(1);
            let command = command(matches, cli, Some(1));
            format!("on the next machine{copy} run, and with --node-rank up to {last} on the others: {command}")
        }
        (n, false) => {
            let others = n.saturating_sub(1);
            format!("on each of the other machines ({others}){copy} run: {}", command(matches, cli, None))
        }
    }
}

/// All arguments of this machine, from the command line or variables, as one line for a shell.
fn command(matches: &ArgMatches, cli: &Cli, node: Option<usize>) -> String {
    let mut words = Vec::new();
    // Variables that admit the other machines to the job, and a setting that all ranks must share.
    if let Some(file) = std::env::var_os("BURN_DDP_SECRET_FILE").filter(|_| cli.secret_file.is_none()) {
        words.push(format!("BURN_DDP_SECRET_FILE={}", quoted(absolute(Path::new(&file)).as_os_str())));
    }
    for name in ["BURN_DDP_TRUST_NETWORK", "BURN_DDP_ENCRYPT"] {
        words.extend(std::env::var_os(name).map(|value| format!("{name}={}", quoted(&value))));
    }
    words.push("burnrun".to_owned());
    words.extend(options(matches, &[&OWN[..], &["secret_file"]].concat()).iter().map(|word| quoted(OsStr::new(word))));
    if let Some(file) = &cli.secret_file {
        words.extend(["--secret-file".to_owned(), quoted(absolute(file).as_os_str())]);
    }
    words.extend(node.into_iter().flat_map(|node| ["--node-rank".to_owned(), node.to_string()]));
    words.extend(cli.program.iter().map(|word| quoted(word)));
    words.join(" ")
}

/// The options of this machine without those named in `without`, from the command line or variables.
pub(super) fn options(matches: &ArgMatches, without: &[&str]) -> Vec<String> {
    let mut words = Vec::new();
    let definition = Cli::command();
    for argument in definition.get_arguments() {
        let id = argument.get_id().as_str();
        let Some(name) = argument.get_long().filter(|_| !without.contains(&id)) else { continue };
        let Some(value) = given(matches, id) else { continue };
        if argument.get_action().takes_values() {
            words.extend([format!("--{name}"), value]);
        } else {
            words.extend(matches.get_flag(id).then(|| format!("--{name}")));
        }
    }
    words
}

/// The value of an argument as it was given.
pub(super) fn given(matches: &ArgMatches, id: &str) -> Option<String> {
    let said = matches!(matches.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
    let values = matches.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy().into_owned());
    said.then(|| values.collect::<Vec<_>>().join(","))
}

/// The absolute path, since the other machine's command may run in another directory.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// A word, quoted so that a shell reads it back unchanged.
fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.into_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    #[test]
    fn the_command_repeats_what_was_said_here() {
        for (line, expected) in [
            (
                "burnrun --nnodes 2 --node_rank=0 --master-addr h -n auto --local-ranks-filter 0,1 ./train --x it's",
                "on the other machine run: burnrun --nproc-per-node auto --nnodes 2 --master-addr h \
                --local-ranks-filter 0,1 --node-rank 1 ./train --x 'it'\\''s'",
            ),
            (
                "burnrun --nnodes 3 --rdzv-endpoint h:7 ./train",
                "on each of the other machines (2) run: burnrun --nnodes 3 --rdzv-endpoint h:7 ./train",
            ),
            (
                "burnrun --secret-file my.secret --nnodes 3 --rdzv-endpoint h:7 ./train",
                "on each of the other machines (2), with a copy of the secret file, run: burnrun --nnodes 3 \
                --rdzv-endpoint h:7 --secret-file HERE/my.secret ./train",
            ),
        ] {
            let here = std::env::current_dir().unwrap();
            let expected = expected.replace("HERE", here.to_str().unwrap());
            let matches = Cli::command().try_get_matches_from(line.split(' ')).unwrap();
            let cli = Cli::from_arg_matches(&matches).unwrap();
            assert_eq!(invitation(&matches, &cli), expected);
        }
    }
}
