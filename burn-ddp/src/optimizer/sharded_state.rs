//! The state of an optimizer whose model has sharded parameters: each rank has the state of its parts.

use std::collections::HashMap;

use burn::tensor::{Bytes, TensorData};
use burn_ddp_comm::ProcessGroup;

use super::state::{Ids, check, split};
use crate::file_failure::{FileFailure, FileWork};
use crate::intercept::Part;
use crate::model::burnpack_header::{Item, Pack};
use crate::model::burnpack_tensors::{StoredTensor, others, tensors};
use crate::model::burnpack_writer::{self, Sink, Source, Write};
use crate::{Error, Result, agreement};

/// The state of this rank, as Burn wrote it.
#[derive(Debug)]
pub(crate) struct StateInParts<'a> {
    tensors: Vec<StateTensor<'a>>,
    /// Maps of the header that describe no tensors.
    others: Vec<(Item, Item)>,
}

/// A tensor of the state.
#[derive(Debug)]
struct StateTensor<'a> {
    /// Path of the parameter and name of the field: the same on all ranks.
    key: (String, String),
    /// Name, dtype and shape of the whole tensor in the file.
    stored: StoredTensor,
    part: Option<Part>,
    /// Bytes of the value on this rank.
    own: &'a [u8],
}

impl<'a> StateInParts<'a> {
    /// Reads the state that was written to `bytes`. `ids` are of the model, and `parts` its sharded parameters.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the state could not be loaded again, or that of a part has another shape than the part.
    pub(crate) fn read(bytes: &'a [u8], ids: &Ids, parts: &HashMap<String, Part>) -> Result<Self> {
        let unusable = |e: String| Error::invalid(format!("the optimizer's state cannot be saved: {e}"));
        let pack = Pack::read(bytes).map_err(unusable)?;
        check(&pack.header, ids)?;
        let paths: HashMap<u64, &str> = ids.iter().rev().map(|(path, id)| (*id, path.as_str())).collect();
        let read = |(mut stored, place): (StoredTensor, std::ops::Range<usize>)| {
            let (id, field) = split(&stored.name).ok_or("it is not the state of an optimizer")?;
            let path = *paths.get(&id).ok_or("it has state of a parameter that is not in the model")?;
            let key = (path.to_owned(), field.to_owned());
            let part = parts.get(path).cloned();
            if let Some(part) = &part {
                if stored.dims != part.own_dims() {
                    let (dims, own) = (&stored.dims, part.own_dims());
                    return Err(format!(
                        "{field} of {path} has shape {dims:?}, but this rank's part of the parameter has shape {own:?}"
                    ));
                }
                stored.dims = part.dims().to_vec();
                stored.len_bytes = stored.dims.iter().product::<usize>() * stored.dtype.size();
            }
            let own = pack.data().get(place).ok_or("it is cut off")?;
            Ok(StateTensor { key, stored, part, own })
        };
        let tensors = tensors(&pack.header).map_err(unusable)?.into_iter().map(read);
        let tensors = tensors.collect::<Result<_, String>>().map_err(unusable)?;
        Ok(StateInParts { tensors, others: others(&pack.header) })
    }

    /// Writes the whole state to rank 0's `sink`, under rank 0's ids and in its order of tensors. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] on every rank if the ranks have states of different parameters; [`Error::File`] if rank 0
    /// cannot do the `work`.
    #[track_caller]
    pub(crate) fn write(mut self, group: &ProcessGroup, sink: &mut Sink, work: &FileWork) -> Result<()> {
        let keys = self.tensors.iter().filter(|tensor| tensor.part.is_some());
        let keys = keys.map(|tensor| (tensor.key.clone(), format!("{:?}", tensor.stored.dtype))).collect::<Vec<_>>();
        let of_main = group.broadcast_object(Some(keys.clone()), 0)?;
        let ordered = if group.rank() == 0 { Ok(()) } else { self.order_by(&of_main, group) };
        agreement::on_outcome(group, "save its optimizer's state", ordered)?;
        burnpack_writer::write(group, self.tensors, &self.others, sink, work)
    }

    /// Keeps only the tensors of parts, in the order of the group's rank 0.
    fn order_by(&mut self, of_main: &[((String, String), String)], group: &ProcessGroup) -> Result<()> {
        // Errors show ranks of the world.
        let (main, rank) = (group.ranks()[0], group.ranks()[group.rank()]);
        let mut parts: HashMap<(String, String), StateTensor<'a>> = HashMap::new();
        let own = self.tensors.drain(..).filter(|tensor| tensor.part.is_some());
        parts.extend(own.map(|tensor| (tensor.key.clone(), tensor)));
        let differs = |(path, field): &(String, String), how: &str| {
            Error::invalid(format!(
                "the ranks have different optimizer states: {field} of {path} {how}. Every rank must save the same \
                 optimizer, after the same steps"
            ))
        };
        for (key, dtype) in of_main {
            let absent = || differs(key, &format!("is on rank {main}, but not on rank {rank}"));
            let own = parts.remove(key).ok_or_else(absent)?;
            if format!("{:?}", own.stored.dtype) != *dtype {
                let how = format!("is {dtype} on rank {main}, but {:?} on rank {rank}", own.stored.dtype);
                return Err(differs(key, &how));
            }
            self.tensors.push(own);
        }
        let more = |key| Err(differs(key, &format!("is on rank {rank}, but not on rank {main}")));
        parts.keys().next().map_or(Ok(()), more)
    }
}

impl Source for StateTensor<'_> {
    fn stored(&self) -> Result<StoredTensor> {
        Ok(self.stored.clone())
    }

    fn is_on_main(&self) -> bool {
        self.part.is_none()
    }

    fn own_len_bytes(&self) -> usize {
        self.part.as_ref().map_or(0, |part| part.own_len_bytes(self.stored.dtype.size()))
    }

    fn whole_len_bytes(&self) -> usize {
        self.stored.len_bytes
    }

    fn own(&self) -> Result<TensorData> {
        Ok(TensorData::from_bytes_vec(self.own.to_vec(), [self.own.len()], burn::tensor::DType::U8))
    }

    fn gather(&self, _: &ProcessGroup, own: &[u8]) -> Result<Bytes> {
        let copy = || Ok(Bytes::from_bytes_vec(own.to_vec()));
        self.part.as_ref().map_or_else(copy, |part| part.gather(self.stored.dtype.size(), own))
    }

    fn put(&self, whole: Option<Bytes>, write: &mut Write<'_>) -> Result<(), FileFailure> {
        write(whole.as_deref().unwrap_or(self.own))
    }
}
