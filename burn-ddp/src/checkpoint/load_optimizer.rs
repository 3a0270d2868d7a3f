//! Loading the state of an optimizer from a checkpoint: rank 0 reads it piece by piece, and each rank gets the whole,
//! or, of sharded parameters, its rows.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_ddp_comm::{DType, ProcessGroup};

use super::load_model::send_rows;
use crate::intercept::{Part, parts};
use crate::model::burnpack_header::{header_bytes, read_header};
use crate::model::burnpack_reader::TensorFile;
use crate::model::burnpack_tensors::{self, StoredTensor, aligned, others, tensors};
use crate::optimizer::state::{Ids, ids_of, read, renamed, warn_of_detour};
use crate::wrap::wrapped_in;
use crate::{Error, Result, agreement, main_first};

/// Bytes of a broadcast, so that its deadline bounds how slow the network may be and not how large the state; an engine
/// may hold copies of as many.
const CHUNK_BYTES: usize = 4 << 20;

/// Returns `optim` with the state in rank 0's `file`, which was saved for a model with the ids `saved_ids`.
/// *Collective*. Burn loads a whole record: a rank needs host memory for its state once beside that which Burn makes of
/// it.
///
/// # Errors
///
/// On every rank: [`Error::Invalid`] if the state belongs to another optimizer or model; [`Error::File`] if rank 0
/// cannot read.
#[track_caller]
pub(super) fn load<M: Module>(
    group: &ProcessGroup,
    optim: ModuleOptimizer,
    model: &M,
    file: Option<&TensorFile>,
    saved_ids: &Ids,
    name: &str,
) -> Result<ModuleOptimizer> {
    let work = format!("load {name}");
    let header = file.map(|file| header_bytes(&file.header)).transpose().map_err(Error::file);
    let header = agreement::on_outcome(group, &work, header)?;
    let header: Vec<u8> = group.broadcast_object(header, 0)?;
    let record = wrapped_in(group, model).and_then(|_| record(&optim, model, &header, saved_ids));
    let (mut record, pieces) = agreement::on_outcome(group, &work, record)?;
    warn_of_detour(model, record.len());
    for piece in pieces {
        piece.fill(group, file, &mut record)?;
    }
    agreement::on_outcome(group, &work, read(optim, record))
}

/// Data that are alike on all ranks, or the rows of one tensor.
struct Piece {
    /// Place in the data of the file.
    from: Range<usize>,
    /// Place of this rank's in its record.
    to: Range<usize>,
    /// Bytes of each rank in `from`; `None` if all get the same.
    ranges: Option<Vec<Range<usize>>>,
}

/// This rank's record without its data, and the pieces that they are read in.
fn record<M: Module>(
    optim: &ModuleOptimizer,
    model: &M,
    header: &[u8],
    saved_ids: &Ids,
) -> Result<(Vec<u8>, Vec<Piece>)> {
    let unusable = |e: String| Error::invalid(format!("the optimizer's state cannot be loaded: {e}"));
    let (header, _) = read_header(&mut &*header).map_err(unusable)?;
    let (ids, parts) = (ids_of(model)?, parts(model));
    let header = renamed(optim, header, saved_ids, &ids)?;
    let part_of: HashMap<u64, (&str, &Part)> =
        ids.iter().filter_map(|(path, id)| Some((*id, (path.as_str(), parts.get(path)?)))).collect();
    let (mut own, mut pieces, mut end) = (Vec::new(), Vec::<Piece>::new(), 0);
    for (mut stored, from) in tensors(&header).map_err(unusable)? {
        let part = stored.id.and_then(|id| part_of.get(&id));
        let ranges = part.map(|(path, part)| rows(&mut stored, path, part)).transpose().map_err(unusable)?;
        let start = aligned(end);
        end = start + stored.len_bytes;
        own.push(stored);
        match pieces.last_mut() {
            // Goes on where the last one ends, here and there.
            Some(last)
                if ranges.is_none()
                    && last.ranges.is_none()
                    && from.start - last.from.start == start - last.to.start =>
            {
                (last.from.end, last.to.end) = (from.end, end);
            }
            _ => pieces.push(Piece { from, to: start..end, ranges }),
        }
    }
    let header = burnpack_tensors::header(&own, &others(&header)).and_then(|header| header_bytes(&header));
    let mut record = header.map_err(unusable)?;
    let data = record.len();
    pieces.iter_mut().for_each(|piece| piece.to = piece.to.start + data..piece.to.end + data);
    record.resize(data + end, 0);
    Ok((record, pieces))
}

/// Makes `stored` this rank's part of a tensor. Returns the bytes of each rank in the whole.
fn rows(stored: &mut StoredTensor, path: &str, part: &Part) -> Result<Vec<Range<usize>>, String> {
    if stored.dims != part.dims() {
        let (dims, whole) = (&stored.dims, part.dims());
        return Err(format!("it has a value of {dims:?} for {path}, which is {whole:?}"));
    }
    stored.dims = part.own_dims();
    stored.len_bytes = stored.dims.iter().product::<usize>() * stored.dtype.size();
    Ok(part.byte_ranges(stored.dtype.size()))
}

impl Piece {
    /// Reads the piece on rank 0, and puts this rank's bytes into `record`. *Collective*.
    #[track_caller]
    fn fill(&self, group: &ProcessGroup, file: Option<&TensorFile>, record: &mut [u8]) -> Result<()> {
        let own = &mut record[self.to.clone()];
        if let Some(ranges) = &self.ranges {
            let mut whole = Vec::new();
            main_first::on_main(group, || {
                whole = file.map_or(Ok(Vec::new()), |file| file.bytes(self.from.clone()))?;
                Ok(())
            })?;
            own.copy_from_slice(&send_rows(group, &whole, ranges)?);
            return Ok(());
        }
        let mut from = self.from.start;
        for chunk in own.chunks_mut(CHUNK_BYTES) {
            main_first::on_main(group, || file.map_or(Ok(()), |file| file.fill(from, chunk)))?;
            group.broadcast_bytes(DType::U8, chunk, 0)?;
            from += chunk.len();
        }
        Ok(())
    }
}
