//! Bytes of any length from one rank to all, in collectives of bounded size.

use burn_ddp_comm::{DType, ProcessGroup, Result};

/// Bytes per collective. Each collective has its own deadline, so the deadline limits how slow the network may be, and
/// not the total length. An engine's copies are no longer than a chunk, too.
const CHUNK_BYTES: usize = 64 << 20;

/// Sends `bytes` to all other ranks, which [`receive`] the same number of bytes from this rank. *Collective*. The
/// sender needs memory for a copy of one chunk.
#[track_caller]
pub(crate) fn send(group: &ProcessGroup, bytes: &[u8]) -> Result<()> {
    send_in_chunks(group, bytes, CHUNK_BYTES)
}

/// The `len` bytes that `root` [sends](send). *Collective*.
#[track_caller]
pub(crate) fn receive(group: &ProcessGroup, len: usize, root: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    receive_into(group, &mut bytes, root)?;
    Ok(bytes)
}

/// Fills `bytes` with the bytes that `root` [sends](send). *Collective*.
#[track_caller]
pub(crate) fn receive_into(group: &ProcessGroup, bytes: &mut [u8], root: usize) -> Result<()> {
    receive_in_chunks(group, bytes, root, CHUNK_BYTES)
}

#[track_caller]
fn send_in_chunks(group: &ProcessGroup, bytes: &[u8], chunk_bytes: usize) -> Result<()> {
    let mut copy = Vec::with_capacity(chunk_bytes.min(bytes.len()));
    for chunk in bytes.chunks(chunk_bytes) {
        copy.clear();
        copy.extend_from_slice(chunk);
        group.broadcast_bytes(DType::U8, &mut copy, group.rank())?;
    }
    Ok(())
}

#[track_caller]
fn receive_in_chunks(group: &ProcessGroup, bytes: &mut [u8], root: usize, chunk_bytes: usize) -> Result<()> {
    bytes.chunks_mut(chunk_bytes).try_for_each(|chunk| group.broadcast_bytes(DType::U8, chunk, root))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ddp;

    #[test]
    fn every_length_arrives_whole() {
        const CHUNK: usize = 64;
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7] {
            let sent: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
            let ranks = Ddp::spawn(3, |ddp| {
                let group = ddp.group();
                if ddp.rank() == 1 {
                    send_in_chunks(group, &sent, CHUNK)?;
                    return Ok(sent.clone());
                }
                let mut received = vec![0; len];
                receive_in_chunks(group, &mut received, 1, CHUNK)?;
                Ok(received)
            });
            assert!(ranks.unwrap().iter().all(|received| *received == sent), "{len} bytes");
        }
    }

    #[test]
    fn a_root_that_does_not_exist_is_an_error() {
        Ddp::spawn(2, |ddp| {
            assert!(receive(ddp.group(), 1, 2).unwrap_err().group_usable());
            Ok(())
        })
        .unwrap();
    }
}
