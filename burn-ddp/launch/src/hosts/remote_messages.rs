//! Messages between the local burnrun and the burnrun on each host: lines of JSON.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Prefix of each answer on the stdout of `burnrun remote`: it tells answers from the ranks' output.
const MARK: &str = "\u{2}burnrun ";
/// Largest order in bytes. It fits into an empty pipe (64 KiB), so sending one never blocks.
pub(super) const ORDER_CAP: usize = 60_000;

/// Part of a job that one host runs. The first line on the stdin of `burnrun remote`.
#[derive(Serialize, Deserialize)]
pub struct Order {
    /// The line of a secret file.
    pub(super) secret: String,
    /// Working directory.
    pub(super) directory: PathBuf,
    /// Variables of the ranks.
    pub(super) env: Vec<(String, String)>,
    /// Command line of the launcher on the host, beginning with the name of the command.
    pub(super) words: Vec<String>,
}

impl Order {
    pub(super) fn line(&self) -> String {
        to_line(self)
    }
}

/// A message from the launcher on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The launcher runs, and waits for its order.
    Ready {
        /// Version of burnrun on the host.
        version: String,
    },
    /// A line of the final report.
    Report(String),
    /// Exit code of the job.
    Ended(i32),
    /// Exit code of a launcher that started no job; the report says why.
    Failed(i32),
}

impl Answer {
    pub(super) fn line(&self) -> String {
        format!("{MARK}{}", to_line(self))
    }

    /// The answer at the end of a line of output, if there is one, and the bytes before it: the start-up files of a
    /// shell may print a text without a newline.
    pub(super) fn read(line: &[u8]) -> Option<(&[u8], Self)> {
        let mark = MARK.as_bytes();
        let at = line.windows(mark.len()).position(|window| window == mark)?;
        Some((&line[..at], serde_json::from_slice(&line[at + mark.len()..]).ok()?))
    }
}

/// Each further line on the stdin of `burnrun remote`: a signal for its part of the job.
#[derive(Serialize, Deserialize)]
pub(super) struct Signalled {
    pub(super) signal: i32,
}

impl Signalled {
    pub(super) fn line(&self) -> String {
        to_line(self)
    }
}

fn to_line(message: &impl Serialize) -> String {
    // serde_json cannot fail on strings and integers. `fan_out` has refused a directory that is not UTF-8.
    serde_json::to_string(message).unwrap_or_default() + "\n"
}

/// Parses `bytes` as a line that either end of a connection may receive.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some((before, answer)) = Answer::read(bytes) {
        assert!(bytes.starts_with(before));
        assert_eq!(Answer::read(answer.line().trim_end().as_bytes()), Some((&b""[..], answer.clone())));
    }
    let order = crate::fuzzing::parse::<Order>(bytes);
    drop(order.map(|order| order.line()));
    let signalled = crate::fuzzing::parse::<Signalled>(bytes);
    drop(signalled.map(|signalled| signalled.line()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_from_output() {
        for answer in [Answer::Ready { version: "1".into() }, Answer::Report("a\nb \u{2}".into()), Answer::Ended(7)] {
            let line = answer.line();
            assert_eq!(line.matches('\n').count(), 1, "{line:?}");
            let title = format!("\u{1b}]0;node1\u{7}{line}");
            for (said, before) in [(&line, &b""[..]), (&title, b"\x1b]0;node1\x07")] {
                assert_eq!(Answer::read(said.trim_end().as_bytes()), Some((before, answer.clone())));
            }
        }
        for output in ["[rank 0] {}", "{\"Ended\":0}", "\u{2}burnrun x", ""] {
            assert_eq!(Answer::read(output.as_bytes()), None, "{output:?}");
        }
    }
}
