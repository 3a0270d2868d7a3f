//! `burnrun`: starts the ranks of a job, watches them and reports the first failure. See `burnrun --help`.

mod cli;

fn main() {
    let launcher = cli::Cli::read().launcher();
    let (report, code) = match launcher.run() {
        Ok(outcome) => (outcome.to_string(), outcome.exit_code),
        Err(error) => (error.to_string(), error.exit_code()),
    };
    let report: String = report.lines().map(|line| format!("burnrun: {line}\n")).collect();
    // Nobody reads stderr any more: the exit code still tells.
    let _ = std::io::Write::write_all(&mut std::io::stderr(), report.as_bytes());
    std::process::exit(code);
}
