//! `burnrun`: starts the ranks of a job, watches them and reports the first failure. See `burnrun --help`.
#![forbid(unsafe_code)]

mod cli;

pub(crate) fn main() {
    std::process::exit(cli::main());
}
