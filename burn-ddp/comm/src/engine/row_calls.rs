//! Gathers and reductions of tensors whose rows are divided between the ranks, made of an engine's other collectives.

use super::row_division::RowDivision;
use super::{Engine, SharedBuffer, SharedView};
use crate::call::Call;
use crate::reduce::{Reduction, Source, reduce};
use crate::{DType, ReduceOp, Result};

/// Reduction of a [`reduce_scatter_parts`](crate::ProcessGroup::reduce_scatter_parts).
#[derive(Clone, Debug, PartialEq)]
pub enum PartReduction {
    /// This op, in which all ranks count alike.
    Op(ReduceOp),
    /// The mean with these weights, one per rank, as in
    /// [`all_reduce_weighted`](crate::ProcessGroup::all_reduce_weighted).
    Weighted(Vec<f64>),
}

/// Gathers the parts of all ranks into `whole`.
pub(crate) fn gather_rows<E: Engine + ?Sized>(
    engine: &mut E,
    call: &Call,
    division: RowDivision,
    part: &[u8],
    whole: &mut [u8],
) -> Result<()> {
    let mut outputs = Vec::with_capacity(division.world_size);
    let mut rest = whole;
    for rank in 0..division.world_size {
        let (output, behind) = rest.split_at_mut(division.bytes_of(rank).len());
        outputs.push(output);
        rest = behind;
    }
    engine.all_gather(call, part, &mut outputs)
}

/// Gathers the parts of all ranks by [`Engine::all_gather`], into the buffer if it is memory of this process, otherwise
/// into new memory. The way of engines whose ranks share no memory.
///
/// # Errors
/// Those of `all_gather`.
pub fn gather_rows_into<E: Engine + ?Sized>(
    engine: &mut E,
    call: &Call,
    division: RowDivision,
    part: &[u8],
    buffer: &mut SharedBuffer,
) -> Result<SharedView> {
    let mut new = SharedBuffer::plain(if buffer.is_plain() { 0 } else { division.len_bytes() });
    let room = if buffer.is_plain() { buffer } else { &mut new };
    gather_rows(engine, call, division, part, room.bytes_mut())?;
    Ok(room.view())
}

/// Reduces `whole` over all ranks, and leaves this rank's rows in `part`: by [`Engine::reduce_scatter`], or, with
/// weights, which the caller has checked, by [`Engine::all_to_all`].
///
/// # Errors
/// Those of these collectives.
pub fn reduce_rows<E: Engine + ?Sized>(
    engine: &mut E,
    call: &Call,
    (dtype, division): (DType, RowDivision),
    whole: &[u8],
    reduction: &PartReduction,
    part: &mut [u8],
) -> Result<()> {
    if division.is_even() {
        return reduce_even_rows(engine, call, dtype, whole, reduction, part);
    }
    let mut padded = vec![0; division.part_bytes()];
    reduce_even_rows(engine, call, dtype, &division.padded(whole), reduction, &mut padded)?;
    part.copy_from_slice(&padded[..part.len()]);
    Ok(())
}

/// [`reduce_rows`] of `input`, which is `[world, n]`.
fn reduce_even_rows<E: Engine + ?Sized>(
    engine: &mut E,
    call: &Call,
    dtype: DType,
    input: &[u8],
    reduction: &PartReduction,
    output: &mut [u8],
) -> Result<()> {
    let weights = match reduction {
        PartReduction::Op(op) => return engine.reduce_scatter(call, dtype, input, output, *op),
        PartReduction::Weighted(weights) => weights,
    };
    // Row `j` of each rank goes to rank `j`, which reduces it.
    let mut rows = vec![0; input.len()];
    engine.all_to_all(call, input, &mut rows)?;
    let row = |rank: usize| Source::Bytes(&rows[rank * output.len()..][..output.len()]);
    let sources: Vec<Source<'_>> = (0..weights.len()).map(row).collect();
    reduce(dtype, Reduction::Weighted(weights), &sources, output)
}
