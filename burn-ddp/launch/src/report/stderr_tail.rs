//! End of a rank's standard error, for the report: its last lines, and its panics wherever they stood.

use std::collections::VecDeque;

const LINES: usize = 10;
const LINE_CAP_BYTES: usize = 500;
/// Number of panics that are stored. One panic often causes others (a worker's death closes a channel), so the last one
/// alone may not show the cause.
const PANICS: usize = 3;
const PANIC_LINES: usize = 6;

/// The last lines of a stream, without blank lines and frames of backtraces, which would push out the message above
/// them.
#[derive(Default)]
pub(crate) struct StderrTail {
    lines: VecDeque<String>,
    panics: VecDeque<Vec<String>>,
    state: State,
}

#[derive(Default, PartialEq)]
enum State {
    #[default]
    Text,
    /// Inside a panic, after `thread 'main' panicked at …`: the message follows.
    Panic,
    /// Inside a backtrace, after `stack backtrace:`.
    Frames,
}

/// Content of a [`StderrTail`] at the end of the stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct StderrSummary {
    pub(crate) lines: Vec<String>,
    /// Each as `src/main.rs:5:9: message`.
    pub(crate) panics: Vec<String>,
}

impl StderrTail {
    pub(crate) fn push(&mut self, line: &[u8]) {
        let line = line.trim_ascii_end();
        let line = String::from_utf8_lossy(&line[..line.len().min(LINE_CAP_BYTES)]).into_owned();
        if line.is_empty() || (self.state == State::Frames && is_frame(&line)) {
            return;
        }
        if line.eq_ignore_ascii_case("stack backtrace:") {
            self.state = State::Frames;
            return;
        }
        if let Some(place) = panic_place(&line) {
            self.state = State::Panic;
            keep(&mut self.panics, vec![place.to_owned()], PANICS);
        } else if self.state == State::Panic && !line.starts_with("note: ") {
            if let Some(panic) = self.panics.back_mut().filter(|panic| panic.len() < PANIC_LINES) {
                panic.push(line.clone());
            }
        } else {
            self.state = State::Text;
        }
        keep(&mut self.lines, line, LINES);
    }

    pub(crate) fn summary(self) -> StderrSummary {
        let panics = self.panics.into_iter().map(|mut panic| {
            let place = panic.remove(0);
            format!("{place} {}", panic.join(" ")).trim_end().to_owned()
        });
        StderrSummary { panics: panics.collect(), lines: self.lines.into() }
    }
}

fn keep<T>(queue: &mut VecDeque<T>, value: T, most: usize) {
    if queue.len() == most {
        queue.pop_front();
    }
    queue.push_back(value);
}

/// `src/main.rs:5:9:` of the line `thread 'main' (4711) panicked at src/main.rs:5:9:`.
fn panic_place(line: &str) -> Option<&str> {
    line.strip_prefix("thread '").and_then(|rest| rest.split_once(" panicked at ")).map(|(_, place)| place)
}

/// `  12: core::panicking::panic_fmt` or `      at /rustc/…/panicking.rs:75:14`.
fn is_frame(line: &str) -> bool {
    let text = line.trim_start();
    let indented = text.len() < line.len();
    let number = text.split_once(": ").is_some_and(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    indented && (number || text.starts_with("at "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remember<'a>(lines: impl IntoIterator<Item = &'a str>) -> StderrSummary {
        let mut tail = StderrTail::default();
        lines.into_iter().for_each(|line| tail.push(line.as_bytes()));
        tail.summary()
    }

    #[test]
    fn the_last_lines_that_say_something_are_kept() {
        let many: Vec<_> = (0..30).flat_map(|i| [format!("line {i}\r"), String::new()]).collect();
        let long = "y".repeat(5000);
        let kept = remember(many.iter().map(String::as_str).chain([&long[..]])).lines;
        assert_eq!(kept.len(), LINES);
        assert_eq!(kept[0], "line 21");
        assert_eq!(kept[9], "y".repeat(LINE_CAP_BYTES));
    }

    #[test]
    fn a_backtrace_does_not_hide_the_panic() {
        let frames: Vec<_> =
            (0..40).flat_map(|i| [format!("  {i}: core::ops::f{i}"), "       at /rustc/a.rs:1:2".into()]).collect();
        let text =
            ["epoch 1", "thread 'main' (77) panicked at src/train.rs:88:13:", "index out of bounds:", "the len is 3"];
        let after = ["note: Some details are omitted", "Error: 1: not a frame"];
        let all = text.into_iter().chain(["stack backtrace:"]).chain(frames.iter().map(String::as_str)).chain(after);
        let found = remember(all);
        assert_eq!(found.panics, ["src/train.rs:88:13: index out of bounds: the len is 3"]);
        assert_eq!(found.lines, [&text[..], &after[..]].concat());
    }

    #[test]
    fn the_last_panics_are_kept_in_order() {
        let lines: Vec<_> = (0..5)
            .flat_map(|i| {
                [format!("thread 'worker' panicked at a.rs:{i}:1:"), format!("no {i}"), "note: run with".into()]
            })
            .collect();
        let found = remember(lines.iter().map(String::as_str));
        assert_eq!(found.panics, ["a.rs:2:1: no 2", "a.rs:3:1: no 3", "a.rs:4:1: no 4"]);
    }
}
