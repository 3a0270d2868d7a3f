//! Elements of a collective in a device's memory.
#![allow(unsafe_code)]

use burn_ddp_comm::{DType, Error, Result};

use crate::device_and_pinned_memory::Region;
use crate::driver::DevicePtr;
use crate::event::Event;

/// A run of elements on a device, and the address that their result is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address of the elements.
    pub input: DevicePtr,
    /// Number of elements.
    pub input_elems: usize,
    /// Address of the result; may equal `input` in a reduction.
    pub output: DevicePtr,
    /// Number of elements of the result: in a reduction that of the input.
    pub output_elems: usize,
}

impl Piece {
    /// A run of `len_elems` elements, and room for as many reduced ones.
    pub fn reduced(input: DevicePtr, output: DevicePtr, len_elems: usize) -> Piece {
        Piece { input, input_elems: len_elems, output, output_elems: len_elems }
    }
}

/// Elements of a collective on device memory, as this crate's engine takes them: pieces, and the events `ready` and
/// `done` before and behind the collective.
///
/// A [reduction](burn_ddp_comm::ProcessGroup::all_reduce_on_device) has any number of pieces. A
/// [gather](burn_ddp_comm::ProcessGroup::all_gather_parts_on_device) has one: this rank's part, and room for the whole;
/// a [scatter](burn_ddp_comm::ProcessGroup::reduce_scatter_parts_on_device), too: the whole, and room for this rank's
/// part.
#[derive(Debug)]
pub struct DeviceElements {
    ordinal: usize,
    pieces: Vec<Piece>,
    ready: Option<Event>,
    pub(crate) done: Option<Event>,
}

impl DeviceElements {
    /// The elements of `pieces` on the device `ordinal`. The collective waits for `ready`, behind which the elements
    /// are written; `None` if they are written already.
    ///
    /// # Safety
    /// For each piece `input` and `output` are memory of that device for as many elements of the collective's type as
    /// the piece says. An output overlaps no other piece; it does not overlap its own input, but may equal it in a
    /// reduction. From now until [`done`](Self::done) nothing else writes the inputs or uses the outputs, except work
    /// before `ready`, and the memory is not freed. Nor does anything use the input of a scatter in which this rank has
    /// the weight 0: zeros are written there. If the collective fails, that holds until `done`, or forever if there is
    /// none.
    pub unsafe fn new(ordinal: usize, pieces: Vec<Piece>, ready: Option<Event>) -> DeviceElements {
        DeviceElements { ordinal, pieces, ready, done: None }
    }

    /// Event behind the collective; `None` until that is enqueued. Work that uses the outputs waits for it, on the
    /// device.
    pub fn done(&self) -> Option<&Event> {
        self.done.as_ref()
    }

    pub(crate) fn ready(&self) -> Option<&Event> {
        self.ready.as_ref()
    }

    /// Inputs and outputs of a reduction, if they are `len_elems` elements of `dtype` on the device `ordinal`.
    pub(crate) fn to_reduce(&self, ordinal: usize, dtype: DType, len_elems: usize) -> Result<Vec<(Region, Region)>> {
        let total = self.pieces.iter().try_fold(0_usize, |total, piece| total.checked_add(piece.input_elems));
        if total != Some(len_elems) || self.pieces.iter().any(|piece| piece.input_elems != piece.output_elems) {
            let lens: Vec<usize> = self.pieces.iter().map(|piece| piece.input_elems).collect();
            return refuse(format!("the pieces have {lens:?} elements, which do not add up to {len_elems}"));
        }
        let pieces = self.pieces.iter().filter(|piece| piece.input_elems > 0);
        pieces.map(|piece| self.regions(ordinal, dtype, *piece)).collect()
    }

    /// Input and output of a gather or a scatter, if they have these numbers of bytes on the device `ordinal`.
    pub(crate) fn to_divide(
        &self,
        ordinal: usize,
        dtype: DType,
        (input_bytes, output_bytes): (usize, usize),
    ) -> Result<(Region, Region)> {
        let [piece] = self.pieces[..] else {
            return refuse(format!("{} pieces for a gather or a scatter, which has one", self.pieces.len()));
        };
        let regions = self.regions(ordinal, dtype, piece)?;
        let (input, output) = regions;
        if (input.len_bytes, output.len_bytes) != (input_bytes, output_bytes) {
            return refuse(format!(
                "an input of {} bytes and room for {}, but the RowDivision has {input_bytes} and {output_bytes}",
                input.len_bytes, output.len_bytes
            ));
        }
        Ok(regions)
    }

    fn regions(&self, ordinal: usize, dtype: DType, piece: Piece) -> Result<(Region, Region)> {
        if self.ordinal != ordinal {
            return refuse(format!("elements on CUDA device {} for an engine on device {ordinal}", self.ordinal));
        }
        let region = |pointer: DevicePtr, len_elems: usize| {
            let size = dtype.size_bytes();
            let Some(len_bytes) = len_elems.checked_mul(size) else {
                return refuse(format!("{len_elems} {dtype} elements are more than there can be"));
            };
            if len_bytes > 0 && (pointer == 0 || !pointer.is_multiple_of(size as u64)) {
                return refuse(format!("there can be no {dtype} elements at the device's address {pointer:#x}"));
            }
            // SAFETY: by the contract of `new`.
            Ok(unsafe { Region::new(pointer, len_bytes, ordinal) })
        };
        Ok((region(piece.input, piece.input_elems)?, region(piece.output, piece.output_elems)?))
    }

    /// Hash of how the elements are cut into pieces: all ranks must cut alike.
    pub(crate) fn cut(&self) -> u64 {
        let pieces = self.pieces.iter().filter(|piece| piece.input_elems > 0);
        pieces.fold(0xcbf2_9ce4_8422_2325, |hash, piece| {
            (hash ^ piece.input_elems as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        })
    }
}

fn refuse<R>(message: String) -> Result<R> {
    Err(Error::InvalidArgument { message, rank: None, during: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ordinal: usize, pieces: &[(u64, u64, usize)]) -> DeviceElements {
        let piece = |(input, output, len_elems): &(u64, u64, usize)| Piece::reduced(*input, *output, *len_elems);
        // SAFETY: nothing is ever enqueued with these.
        unsafe { DeviceElements::new(ordinal, pieces.iter().map(piece).collect(), None) }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let place = of(0, &[(64, 64, 3), (128, 256, 5)]);
        assert_eq!(place.to_reduce(0, DType::F32, 8).unwrap().len(), 2);
        for (error, says) in [
            (place.to_reduce(1, DType::F32, 8), "CUDA device 0 for an engine on device 1"),
            (place.to_reduce(0, DType::F32, 9), "[3, 5] elements, which do not add up to 9"),
            (of(0, &[(64, 66, 3)]).to_reduce(0, DType::F32, 3), "address 0x42"),
            (of(0, &[(0, 64, 3)]).to_reduce(0, DType::U8, 3), "address 0x0"),
            (of(0, &[(64, 64, usize::MAX / 2)]).to_reduce(0, DType::F64, usize::MAX / 2), "more than there can be"),
            (of(0, &[(64, 64, usize::MAX), (64, 64, 3)]).to_reduce(0, DType::U8, 2), "do not add up to 2"),
            (part_of(3, 9).to_reduce(0, DType::F32, 3), "do not add up to 3"),
        ] {
            let text = error.unwrap_err().to_string();
            assert!(text.contains(says), "{text}");
        }
    }

    fn part_of(input_elems: usize, output_elems: usize) -> DeviceElements {
        let piece = Piece { input: 64, input_elems, output: 128, output_elems };
        // SAFETY: nothing is ever enqueued with these.
        unsafe { DeviceElements::new(0, vec![piece], None) }
    }

    #[test]
    fn a_gather_or_a_scatter_has_one_piece_of_the_lengths_of_its_division() {
        let (input, output) = part_of(3, 9).to_divide(0, DType::F32, (12, 36)).unwrap();
        assert_eq!((input.pointer, input.len_bytes, output.pointer, output.len_bytes), (64, 12, 128, 36));
        for (error, says) in [
            (part_of(3, 9).to_divide(1, DType::F32, (12, 36)), "CUDA device 0 for an engine on device 1"),
            (part_of(3, 9).to_divide(0, DType::F32, (16, 36)), "12 bytes and room for 36, but the RowDivision has 16"),
            (part_of(3, 9).to_divide(0, DType::F32, (12, 40)), "has 12 and 40"),
            (of(0, &[]).to_divide(0, DType::F32, (12, 36)), "0 pieces for a gather or a scatter"),
            (of(0, &[(64, 64, 3), (128, 256, 5)]).to_divide(0, DType::F32, (12, 12)), "2 pieces"),
        ] {
            let text = error.unwrap_err().to_string();
            assert!(text.contains(says), "{text}");
        }
    }

    #[test]
    fn empty_pieces_have_no_address() {
        assert_eq!(of(0, &[(0, 0, 0)]).to_reduce(0, DType::F32, 0).unwrap(), []);
    }

    #[test]
    fn other_cuts_have_other_numbers() {
        let cut = |lens: &[usize]| of(0, &lens.iter().map(|len| (64, 64, *len)).collect::<Vec<_>>()).cut();
        assert_ne!(cut(&[3, 5]), cut(&[5, 3]));
        assert_ne!(cut(&[8]), cut(&[5, 3]));
        assert_eq!(cut(&[5, 0, 3]), cut(&[5, 3]));
    }
}
