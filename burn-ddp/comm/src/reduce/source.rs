//! Sources of a reduction: one per rank.

/// Elements of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// In memory of their own, such as those that came from a peer.
    Bytes(&'a [u8]),
    /// In the output buffer, which the result replaces.
    Output,
}

impl<'a> Source<'a> {
    /// The elements from byte `start` on.
    #[inline(always)]
    pub(super) fn from(self, start: usize) -> Source<'a> {
        match self {
            Source::Bytes(bytes) => Source::Bytes(&bytes[start..]),
            Source::Output => Source::Output,
        }
    }

    /// Number of bytes; `None` for [`Source::Output`].
    #[inline]
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Source::Bytes(bytes) => Some(bytes.len()),
            Source::Output => None,
        }
    }

    /// The `len` bytes from byte `start` on.
    #[inline]
    pub(super) fn part(self, start: usize, len: usize) -> Source<'a> {
        match self {
            Source::Bytes(bytes) => Source::Bytes(&bytes[start..start + len]),
            Source::Output => Source::Output,
        }
    }
}
