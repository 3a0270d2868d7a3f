//! Bytes that a collective can take as elements of any type.

/// Bytes aligned for every dtype.
#[derive(Debug, Default)]
pub(crate) struct AlignedBytes {
    words: Vec<u64>,
    len_bytes: usize,
}

impl AlignedBytes {
    pub(crate) fn zeroed(len_bytes: usize) -> Self {
        AlignedBytes { words: vec![0; len_bytes.div_ceil(8)], len_bytes }
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut buffer = AlignedBytes::zeroed(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len_bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len_bytes]
    }
}
