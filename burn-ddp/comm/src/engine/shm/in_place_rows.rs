//! Gathers and reductions of divided tensors in shared buffers.
//!
//! In a gather each rank copies its rows to the one result, which all read; in a reduction each rank reads its rows of
//! all inputs. Ranks that pass different kinds of buffers gather and reduce as from plain slices, and gather so while
//! one of them still views the result that would be overwritten.
#![allow(unsafe_code)]

use std::ops::Range;

use super::engine::ShmEngine;
use super::in_place_reductions::{Passed, replace_if_failed};
use crate::call::Call;
use crate::engine::{gather_rows_into, reduce_rows};
use crate::reduce::{Reduction, Source, reduce};
use crate::{DType, PartReduction, Result, RowDivision, SharedBuffer, SharedView};

impl ShmEngine {
    pub(super) fn gather_shared(
        &mut self,
        call: &Call,
        division: RowDivision,
        part: &[u8],
        buffer: &mut SharedBuffer,
    ) -> Result<SharedView> {
        let own = division.bytes_of(self.board.rank());
        let copy = |rooms: &mut [&mut [u8]]| {
            rooms[0].copy_from_slice(part);
            Ok(())
        };
        match self.gather_shared_by(call, buffer, &[own], copy)? {
            Some(view) => Ok(view),
            None => gather_rows_into(self, &call.next_stage(), division, part, buffer),
        }
    }

    /// Gathers into the result of `buffer`: `fill` writes what is at the ranges `mine`, which no other rank writes.
    /// `None` if the ranks of the machine cannot share a result.
    pub(in crate::engine) fn gather_shared_by(
        &mut self,
        call: &Call,
        buffer: &mut SharedBuffer,
        mine: &[Range<usize>],
        fill: impl FnOnce(&mut [&mut [u8]]) -> Result<()>,
    ) -> Result<Option<SharedView>> {
        let passed = self.announce_buffer(call, buffer)?;
        let (Passed::Free, Some(arena)) = (passed, buffer.as_arena()) else { return Ok(None) };
        // SAFETY: no rank has a view of the result, and every rank writes ranges of its own: all have announced the
        // same division.
        let mut rooms: Vec<&mut [u8]> = mine.iter().map(|range| unsafe { arena.result(range) }).collect();
        let outcome = fill(&mut rooms).and_then(|()| {
            self.done(0);
            self.await_done(call, self.board.peers(), 0)?;
            Ok(Some(SharedView::arena(arena.view())))
        });
        replace_if_failed(buffer, outcome)
    }

    pub(super) fn reduce_shared_rows(
        &mut self,
        call: &Call,
        (dtype, division): (DType, RowDivision),
        buffer: &mut SharedBuffer,
        reduction: &PartReduction,
        part: &mut [u8],
    ) -> Result<()> {
        let passed = self.announce_buffer(call, buffer)?;
        let (Passed::Free | Passed::Viewed, Some(arena)) = (passed, buffer.as_arena()) else {
            return reduce_rows(self, &call.next_stage(), (dtype, division), buffer.bytes_mut(), reduction, part);
        };
        let reduction = match reduction {
            PartReduction::Op(op) => Reduction::Op(*op),
            PartReduction::Weighted(weights) => Reduction::Weighted(weights),
        };
        let own = division.bytes_of(self.board.rank());
        // SAFETY: all have announced; this rank publishes only below that it is done.
        let sources = (0..self.board.size()).map(|rank| Source::Bytes(unsafe { arena.input(rank, &own) }));
        let outcome = reduce(dtype, reduction, &sources.collect::<Vec<_>>(), part).and_then(|()| {
            self.done(0);
            self.await_done(call, self.board.peers(), 0)
        });
        replace_if_failed(buffer, outcome)
    }
}
