//! Messages between the local burnrun and those on the hosts: lines of JSON.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Begins each answer's line on the stdout of `burnrun remote`, which it shares with the ranks' output.
const MARK: &str = "\u{2}burnrun ";
/// Largest order in bytes: a pipe takes it without a reader.
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
    /// Command line for the launcher there, with its name.
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
    /// It runs, and waits for its order.
    Ready {
        /// Version of burnrun there.
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

    /// The answer at the end of a line of output, if there is one, and what stands before it: a shell's start-up files
    /// may write without a newline.
    pub(super) fn read(line: &[u8]) -> Option<(&[u8], Self)> {
        let mark = MARK.as_bytes();
        let at = line.windows(mark.len()).position(|window| window == mark)?;
        Some((&line[..at], serde_json::from_slice(&line[at + mark.len()..]).ok()?))
    }
}

/// Further line on the stdin of `burnrun remote`: the signal that its job gets.
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
    // Strings and integers: serde_json cannot fail on them. A path of other bytes is refused before.
    serde_json::to_string(message).unwrap_or_default() + "\n"
}

/// A line from the other end of a connection, on either side.
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
