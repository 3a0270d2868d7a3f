//! Loading the state of an optimizer from a checkpoint: rank 0 reads it piece by piece, and each rank gets all of it,
//! but of sharded parameters only its rows.

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

/// Bytes of one broadcast, so that its deadline limits how slow the network may be, and not how large the state. An
/// engine may hold copies of as many bytes.
const CHUNK_BYTES: usize = 4 << 20;

/// Returns `optim` with the state in rank 0's `file`, which was saved for a model with the ids `saved_ids`.
/// *Collective*. Burn loads a whole record, so a rank needs host memory for its encoded state besides the loaded one.
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

/// A range of the file's data that all ranks get, or one tensor of which each rank gets its rows.
struct Piece {
    /// Place in the data of the file.
    from: Range<usize>,
    /// Place of this rank's bytes in its record.
    to: Range<usize>,
    /// Bytes of each rank in `from`; `None` if all ranks get all of `from`.
    ranges: Option<Vec<Range<usize>>>,
}

/// This rank's record with space for its data, and the pieces in which the data are read.
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
            // The tensor follows the last piece in the file and in the record: the piece is extended.
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

/// Turns `stored`, a whole tensor, into this rank's part of it. Returns the bytes of each rank in the whole tensor.
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
