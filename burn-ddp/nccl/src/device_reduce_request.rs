//! Elements that are reduced in a device's memory.
#![allow(unsafe_code)]

use burn_ddp_comm::{DType, Error, Result};

use crate::device_and_pinned_memory::Region;
use crate::driver::DevicePtr;
use crate::event::Event;

/// A run of elements on a device, and the address that their reduction is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address of the elements.
    pub input: DevicePtr,
    /// Address of the reduced elements; may equal `input`.
    pub output: DevicePtr,
    /// Number of elements.
    pub len_elems: usize,
}

/// Elements for [`OnDevice`](burn_ddp_comm::engine::OnDevice) as this crate's engine takes them: pieces that are
/// reduced in one collective, between the events `ready` and `done`.
#[derive(Debug)]
pub struct DeviceReduce {
    ordinal: usize,
    pieces: Vec<Piece>,
    ready: Option<Event>,
    pub(crate) done: Option<Event>,
}

impl DeviceReduce {
    /// A reduction of `pieces` on the device `ordinal`. The reduction waits for `ready`, behind which the elements are
    /// written; `None` if they are written already.
    ///
    /// # Safety
    /// For each piece `input` and `output` are memory of that device for `len_elems` elements of the collective's type.
    /// An output overlaps no other piece; it equals or does not overlap its own input. From now until
    /// [`done`](Self::done) nothing else writes the inputs or uses the outputs, except work before `ready`, and the
    /// memory is not freed. If the collective fails, that holds until `done`, or forever if there is none.
    pub unsafe fn new(ordinal: usize, pieces: Vec<Piece>, ready: Option<Event>) -> DeviceReduce {
        DeviceReduce { ordinal, pieces, ready, done: None }
    }

    /// Event behind the reduction; `None` until that is enqueued. Work that uses the outputs waits for it, on the
    /// device.
    pub fn done(&self) -> Option<&Event> {
        self.done.as_ref()
    }

    pub(crate) fn ready(&self) -> Option<&Event> {
        self.ready.as_ref()
    }

    /// Regions of the inputs and outputs, if they are `len_elems` elements of `dtype` on the device `ordinal`.
    pub(crate) fn regions(&self, ordinal: usize, dtype: DType, len_elems: usize) -> Result<Vec<(Region, Region)>> {
        if self.ordinal != ordinal {
            return refuse(format!("elements on CUDA device {} for an engine on device {ordinal}", self.ordinal));
        }
        let total = self.pieces.iter().try_fold(0_usize, |total, piece| total.checked_add(piece.len_elems));
        if total != Some(len_elems) {
            let lens: Vec<usize> = self.pieces.iter().map(|piece| piece.len_elems).collect();
            return refuse(format!("the pieces have {lens:?} elements, which do not add up to {len_elems}"));
        }
        let region = |pointer: DevicePtr, len_elems: usize| {
            let size = dtype.size_bytes();
            let Some(len_bytes) = len_elems.checked_mul(size) else {
                return refuse(format!("{len_elems} {dtype} elements are more than there can be"));
            };
            if pointer == 0 || !pointer.is_multiple_of(size as u64) {
                return refuse(format!("there can be no {dtype} elements at the device's address {pointer:#x}"));
            }
            // SAFETY: by the contract of `new`.
            Ok(unsafe { Region::new(pointer, len_bytes, ordinal) })
        };
        let pieces = self.pieces.iter().filter(|piece| piece.len_elems > 0);
        pieces
            .map(|piece| Ok((region(piece.input, piece.len_elems)?, region(piece.output, piece.len_elems)?)))
            .collect()
    }

    /// Hash of how the elements are cut into pieces: all ranks must cut alike.
    pub(crate) fn cut(&self) -> u64 {
        let pieces = self.pieces.iter().filter(|piece| piece.len_elems > 0);
        pieces.fold(0xcbf2_9ce4_8422_2325, |hash, piece| {
            (hash ^ piece.len_elems as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        })
    }
}

fn refuse<R>(message: String) -> Result<R> {
    Err(Error::InvalidArgument { message, rank: None, during: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ordinal: usize, pieces: &[(u64, u64, usize)]) -> DeviceReduce {
        let piece = |(input, output, len_elems): &(u64, u64, usize)| Piece {
            input: *input,
            output: *output,
            len_elems: *len_elems,
        };
        // SAFETY: nothing is ever enqueued with these.
        unsafe { DeviceReduce::new(ordinal, pieces.iter().map(piece).collect(), None) }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let place = of(0, &[(64, 64, 3), (128, 256, 5)]);
        assert_eq!(place.regions(0, DType::F32, 8).unwrap().len(), 2);
        for (error, says) in [
            (place.regions(1, DType::F32, 8), "CUDA device 0 for an engine on device 1"),
            (place.regions(0, DType::F32, 9), "[3, 5] elements, which do not add up to 9"),
            (of(0, &[(64, 66, 3)]).regions(0, DType::F32, 3), "address 0x42"),
            (of(0, &[(0, 64, 3)]).regions(0, DType::U8, 3), "address 0x0"),
            (of(0, &[(64, 64, usize::MAX / 2)]).regions(0, DType::F64, usize::MAX / 2), "more than there can be"),
            (of(0, &[(64, 64, usize::MAX), (64, 64, 3)]).regions(0, DType::U8, 2), "do not add up to 2"),
        ] {
            let text = error.unwrap_err().to_string();
            assert!(text.contains(says), "{text}");
        }
    }

    #[test]
    fn empty_pieces_have_no_address() {
        assert_eq!(of(0, &[(0, 0, 0)]).regions(0, DType::F32, 0).unwrap(), []);
    }

    #[test]
    fn other_cuts_have_other_numbers() {
        let cut = |lens: &[usize]| of(0, &lens.iter().map(|len| (64, 64, *len)).collect::<Vec<_>>()).cut();
        assert_ne!(cut(&[3, 5]), cut(&[5, 3]));
        assert_ne!(cut(&[8]), cut(&[5, 3]));
        assert_eq!(cut(&[5, 0, 3]), cut(&[5, 3]));
    }
}
