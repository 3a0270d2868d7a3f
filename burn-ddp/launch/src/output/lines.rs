//! Bytes in, whole lines out: the part of the output relay that reads and writes no files.

use crate::report::stderr_tail::StderrTail;

/// A longer line is split, so that a stream without newlines costs bounded memory and still shows up.
const LINE_CAP_BYTES: usize = 64 * 1024;

/// One stream of one rank. Complete lines are passed on at once; an incomplete line waits for its newline.
pub(crate) struct Lines {
    prefix: Vec<u8>,
    pending: Vec<u8>,
}

impl Lines {
    pub(crate) fn new(prefix: String) -> Self {
        Self { prefix: prefix.into_bytes(), pending: Vec::new() }
    }

    /// Appends to `out` every line that `bytes` completes, each with the prefix and one newline, whatever its encoding.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>, tail: Option<&mut StderrTail>) {
        let mut tail = tail;
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let mut rest = piece;
            while !rest.is_empty() {
                let room = LINE_CAP_BYTES - self.pending.len();
                let (head, later) = rest.split_at(room.min(rest.len()));
                self.pending.extend_from_slice(head);
                rest = later;
                if self.pending.ends_with(b"\n") || self.pending.len() == LINE_CAP_BYTES {
                    self.flush(out, tail.as_deref_mut());
                }
            }
        }
    }

    /// Appends the incomplete line, if there is one, as a line of its own.
    pub(crate) fn flush(&mut self, out: &mut Vec<u8>, tail: Option<&mut StderrTail>) {
        if self.pending.is_empty() {
            return;
        }
        let line = self.pending.strip_suffix(b"\n").unwrap_or(&self.pending);
        out.extend_from_slice(&self.prefix);
        out.extend_from_slice(line);
        out.push(b'\n');
        if let Some(tail) = tail {
            tail.push(line);
        }
        self.pending.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relay(chunks: &[&[u8]]) -> Vec<u8> {
        let (mut lines, mut out) = (Lines::new("> ".into()), Vec::new());
        for chunk in chunks {
            lines.push(chunk, &mut out, None);
        }
        lines.flush(&mut out, None);
        out
    }

    #[test]
    fn lines_are_prefixed_wherever_the_reads_end() {
        let text: &[u8] = b"one\n\ntwo \xff\xfe\n";
        let expected = b"> one\n> \n> two \xff\xfe\n";
        assert_eq!(relay(&[text]), expected);
        for cut in 0..=text.len() {
            assert_eq!(relay(&[&text[..cut], &text[cut..]]), expected, "cut at {cut}");
        }
    }

    #[test]
    fn an_unfinished_line_waits_and_is_not_lost() {
        let (mut lines, mut out) = (Lines::new("> ".into()), Vec::new());
        lines.push(b"a\nb", &mut out, None);
        assert_eq!(out, b"> a\n");
        lines.flush(&mut out, None);
        lines.flush(&mut out, None);
        assert_eq!(out, b"> a\n> b\n");
    }

    #[test]
    fn an_endless_line_is_split_and_loses_nothing() {
        let out = relay(&[&vec![b'x'; 2 * LINE_CAP_BYTES + 5]]);
        let lengths: Vec<_> = out.split(|&byte| byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [LINE_CAP_BYTES + 2, LINE_CAP_BYTES + 2, 5 + 2, 0]);
    }
}
