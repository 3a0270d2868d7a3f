//! Memory that a group reduces without copying it to another place first.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

#[cfg(target_os = "linux")]
use super::shm::{ArenaBuffer, ArenaView};

/// One rank's buffer in memory that its group can reduce and gather without copies, made by
/// [`ProcessGroup::shared_buffers`](crate::ProcessGroup::shared_buffers).
///
/// Holds this rank's input. The result of a call is read from a [`SharedView`], not from this buffer.
pub struct SharedBuffer {
    memory: Memory,
}

/// The result of a call on [`SharedBuffer`]s, the same on all ranks, read where the engine left it.
///
/// Clones share the same bytes, which never change: while a rank holds a view, further results of its buffer cost a
/// copy.
#[derive(Clone)]
pub struct SharedView {
    memory: Viewed,
}

enum Memory {
    /// Memory of this process.
    Plain(Arc<Words>),
    /// Memory that all ranks of the group map.
    #[cfg(target_os = "linux")]
    Arena(ArenaBuffer),
}

#[derive(Clone)]
enum Viewed {
    Plain(Arc<Words>),
    #[cfg(target_os = "linux")]
    Arena(ArenaView),
}

/// Bytes aligned for every dtype.
#[derive(Clone)]
struct Words {
    words: Vec<u64>,
    len_bytes: usize,
}

impl Words {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len_bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len_bytes]
    }

    /// Sets the length; false if the memory is too small for it.
    fn set_len(&mut self, len_bytes: usize) -> bool {
        let fits = len_bytes <= size_of_val(&self.words[..]);
        if fits {
            self.len_bytes = len_bytes;
        }
        fits
    }
}

impl SharedBuffer {
    /// A buffer in memory of this process, for engines without shared memory.
    pub fn plain(len_bytes: usize) -> SharedBuffer {
        SharedBuffer { memory: Memory::Plain(Arc::new(Words { words: vec![0; len_bytes.div_ceil(8)], len_bytes })) }
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        match &self.memory {
            Memory::Plain(words) => words.len_bytes,
            #[cfg(target_os = "linux")]
            Memory::Arena(arena) => arena.len(),
        }
    }

    /// Makes the buffer `len_bytes` long, with unspecified contents: in the same memory if that is large enough,
    /// otherwise in memory of this process. All ranks set the same length.
    pub fn set_len(&mut self, len_bytes: usize) {
        let fits = match &mut self.memory {
            Memory::Plain(words) if words.len_bytes == len_bytes => true,
            Memory::Plain(words) => Arc::get_mut(words).is_some_and(|words| words.set_len(len_bytes)),
            #[cfg(target_os = "linux")]
            Memory::Arena(arena) => arena.set_len(len_bytes),
        };
        if !fits {
            *self = SharedBuffer::plain(len_bytes);
        }
    }

    /// This rank's input, to be written; aligned for every dtype. Its contents are unspecified after a call.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if let Memory::Plain(words) = &mut self.memory
            && Arc::get_mut(words).is_none()
        {
            *self = SharedBuffer::plain(self.len_bytes());
        }
        match &mut self.memory {
            Memory::Plain(words) => Arc::make_mut(words).bytes_mut(),
            #[cfg(target_os = "linux")]
            Memory::Arena(arena) => arena.bytes_mut(),
        }
    }

    /// True if the memory is this process's own.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.memory, Memory::Plain(_))
    }

    /// The bytes as they are now, for reading only.
    pub fn view(&self) -> SharedView {
        match &self.memory {
            Memory::Plain(words) => SharedView { memory: Viewed::Plain(words.clone()) },
            #[cfg(target_os = "linux")]
            Memory::Arena(arena) => {
                let mut copy = SharedBuffer::plain(arena.len());
                copy.bytes_mut().copy_from_slice(arena.bytes());
                copy.view()
            }
        }
    }
}

#[cfg(target_os = "linux")]
impl SharedBuffer {
    pub(crate) fn arena(arena: ArenaBuffer) -> SharedBuffer {
        SharedBuffer { memory: Memory::Arena(arena) }
    }

    /// The buffer, if it is in memory that all ranks map.
    pub(crate) fn as_arena(&mut self) -> Option<&mut ArenaBuffer> {
        match &mut self.memory {
            Memory::Plain(_) => None,
            Memory::Arena(arena) => Some(arena),
        }
    }
}

#[cfg(target_os = "linux")]
impl SharedView {
    pub(crate) fn arena(view: ArenaView) -> SharedView {
        SharedView { memory: Viewed::Arena(view) }
    }
}

impl Deref for SharedView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Viewed::Plain(words) => words.bytes(),
            #[cfg(target_os = "linux")]
            Viewed::Arena(view) => view.bytes(),
        }
    }
}

impl AsRef<[u8]> for SharedView {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuffer({} bytes)", self.len_bytes())
    }
}

impl fmt::Debug for SharedView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedView({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_buffer_keeps_its_memory_while_it_is_large_enough() {
        let mut buffer = SharedBuffer::plain(16);
        let start = buffer.bytes_mut().as_ptr();
        for len in [9, 0, 16] {
            buffer.set_len(len);
            assert_eq!((buffer.bytes_mut().as_ptr(), buffer.bytes_mut().len()), (start, len));
        }
        let view = buffer.view();
        buffer.set_len(8);
        assert_eq!((buffer.len_bytes(), view.len()), (8, 16), "what is viewed stays as it is");
        buffer.set_len(17);
        assert_eq!(buffer.bytes_mut(), [0; 17]);
    }
}
