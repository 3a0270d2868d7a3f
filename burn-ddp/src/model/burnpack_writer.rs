//! Writing a burnpack one tensor at a time: rank 0 writes the tensors, and gathers before those that it does not hold
//! as a whole, a few small ones at once.

use std::fs::File;
use std::io::{self, Write as _};

use burn::tensor::{Bytes, TensorData};
use burn_ddp_comm::ProcessGroup;
use sha2::{Digest, Sha256};

use super::burnpack_header::{Item, header_bytes};
use super::burnpack_tensors::{StoredTensor, aligned, header};
use crate::file_failure::{FileFailure, FileWork};
use crate::{Error, Result, agreement, main_first};

/// A tensor to be written.
pub(crate) trait Source {
    /// The tensor in the file.
    fn stored(&self) -> Result<StoredTensor>;

    /// True if rank 0 has the whole tensor; otherwise the ranks gather it. The same on all ranks.
    fn is_on_main(&self) -> bool;

    /// Bytes of this rank's part of a tensor that is gathered.
    fn own_len_bytes(&self) -> usize;

    /// Bytes of the whole of a tensor that is gathered. The same on all ranks.
    fn whole_len_bytes(&self) -> usize;

    /// This rank's part of a tensor that is gathered.
    fn own(&self) -> Result<TensorData>;

    /// Puts the ranks' parts, of which `own` is this rank's, together on rank 0, and returns the whole there.
    /// *Collective*.
    fn gather(&self, group: &ProcessGroup, own: &[u8]) -> Result<Bytes>;

    /// Calls `write` with the tensor's bytes in the file: those of `whole` if it was gathered, else of this rank's
    /// value.
    fn put(&self, whole: Option<Bytes>, write: &mut Write<'_>) -> Result<(), FileFailure>;
}

/// Bytes of gathered tensors that rank 0 writes, or reads for other ranks, in one round of all ranks.
pub(crate) const GATHERED_BYTES: usize = 256 << 10;

/// Appends bytes to the file.
pub(crate) type Write<'a> = dyn FnMut(&[u8]) -> Result<(), FileFailure> + 'a;

/// Writes `tensors` to rank 0's `sink`, with the maps `others` in the header. *Collective*: all ranks have the same
/// gathered tensors. Besides what the sink holds, rank 0 needs memory for gathered tensors of 256 KiB, or one that is
/// larger, and for one tensor in the form of the file.
///
/// # Errors
///
/// [`Error::File`] on every rank if rank 0 cannot read a value, or cannot do the `work`: writing the file.
#[track_caller]
pub(crate) fn write<S: Source>(
    group: &ProcessGroup,
    tensors: Vec<S>,
    others: &[(Item, Item)],
    sink: &mut Sink,
    work: &FileWork,
) -> Result<()> {
    let is_main = group.rank() == 0;
    let any_gathered = !tensors.iter().all(Source::is_on_main);
    let mut opening = is_main.then(|| {
        let stored = tensors.iter().map(Source::stored).collect::<Result<Vec<_>>>();
        header_bytes(&header(&stored.map_err(|e| e.to_string())?, others)?)
    });
    let (mut end, mut unread) = (0, None);
    let mut tensors = tensors.into_iter().peekable();
    // Rank 0 may have tensors that the others lack, so only gathered ones begin a new batch.
    let belongs = |bytes: usize, tensor: &S| {
        tensor.is_on_main() || bytes == 0 || bytes + tensor.whole_len_bytes() <= GATHERED_BYTES
    };
    loop {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while let Some(tensor) = tensors.next_if(|tensor| belongs(bytes, tensor)) {
            if tensor.is_on_main() {
                batch.push((tensor, None));
                continue;
            }
            bytes += tensor.whole_len_bytes();
            // A rank that cannot read its part must still make the same collective calls as the others.
            let own = tensor.own().unwrap_or_else(|e| {
                unread.get_or_insert(e);
                let len = tensor.own_len_bytes();
                TensorData::from_bytes_vec(vec![0; len], [len], burn::tensor::DType::U8)
            });
            let whole = tensor.gather(group, own.as_bytes())?;
            batch.extend(is_main.then_some((tensor, Some(whole))));
        }
        let is_last = tensors.peek().is_none();
        let mut write_batch = || -> Result<(), FileFailure> {
            if let Some(header) = opening.take() {
                sink.write_all(&header?)?;
            }
            let mut write = |bytes: &[u8]| {
                let start = aligned(end);
                sink.write_all(&vec![0; start - end]).and_then(|()| sink.write_all(bytes))?;
                end = start + bytes.len();
                Ok(())
            };
            batch.drain(..).try_for_each(|(tensor, whole)| tensor.put(whole, &mut write))?;
            if is_last { Ok(sink.finish()?) } else { Ok(()) }
        };
        main_first::on_main(group, || write_batch().map_err(|e| work.failed(e)))?;
        if is_last {
            break;
        }
    }
    match any_gathered {
        true => agreement::on_outcome(group, "save its parts", unread.map_or(Ok(()), Err::<(), Error>)),
        false => Ok(()),
    }
}

/// Destination of a file's bytes.
#[derive(Debug)]
pub(crate) enum Sink {
    /// Nothing is written: a rank other than 0.
    Absent,
    Memory(Vec<u8>),
    /// A file, its length so far, and the state of its checksum if one is wanted.
    File(File, u64, Option<Sha256>),
}

impl Sink {
    /// Makes the written bytes durable.
    fn finish(&mut self) -> io::Result<()> {
        match self {
            Sink::File(file, ..) => file.sync_all(),
            Sink::Absent | Sink::Memory(_) => Ok(()),
        }
    }
}

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sink::Absent => Ok(bytes.len()),
            Sink::Memory(memory) => memory.write(bytes),
            Sink::File(file, len, sha) => {
                let n = file.write(bytes)?;
                *len += n as u64;
                if let Some(sha) = sha {
                    sha.update(&bytes[..n]);
                }
                Ok(n)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::{Module, Param, ParamId};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Bool, DType, Device, Int, Tensor};

    use super::*;
    use crate::Ddp;
    use crate::model::burnpack_tensors::tensors;
    use crate::model::values::values;

    #[derive(Module, Debug)]
    struct Mixed {
        linear: Linear,
        count: Param<Tensor<1, Int>>,
        mask: Param<Tensor<2, Bool>>,
        empty: Param<Tensor<2>>,
        half: Param<Tensor<2>>,
        none: Param<Tensor<3>>,
    }

    impl Mixed {
        fn new() -> Self {
            let device = Device::flex().autodiff();
            Mixed {
                linear: LinearConfig::new(70, 3).init(&device),
                count: Param::initialized(ParamId::new(), Tensor::arange(0..5, &device)),
                mask: Param::initialized(ParamId::new(), Tensor::<2>::ones([2, 3], &device).greater_elem(0.5)),
                empty: Param::from_tensor(Tensor::empty([0, 4], &device)),
                half: Param::from_tensor(Tensor::ones([2, 2], (&device, DType::F16))),
                none: Param::from_tensor(Tensor::empty([2, 0, 3], &device)),
            }
        }
    }

    fn file_of<M: Module>(ddp: &Ddp, model: &M) -> Result<Vec<u8>> {
        let mut sink = Sink::Memory(Vec::new());
        let work = FileWork { cannot: "cannot write".into(), path: None };
        write(ddp.group(), values(model)?.1, &[], &mut sink, &work)?;
        Ok(match sink {
            Sink::Memory(bytes) => bytes,
            _ => Vec::new(),
        })
    }

    #[test]
    fn a_file_has_the_bytes_of_burns() {
        Ddp::spawn(1, |ddp| {
            let mixed = Mixed::new();
            assert_eq!(file_of(&ddp, &mixed)?, mixed.valid().into_record().into_bytes()?.to_vec());
            let plain = LinearConfig::new(3, 2).init(&Device::flex());
            assert_eq!(file_of(&ddp, &plain)?, plain.into_record().into_bytes()?.to_vec());
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_header_that_burn_wrote_is_written_again_alike() {
        let bytes = Mixed::new().into_record().into_bytes().unwrap();
        let (read, start) = crate::model::burnpack_header::read_header(&mut &bytes[..]).unwrap();
        let stored: Vec<StoredTensor> = tensors(&read).unwrap().into_iter().map(|(tensor, _)| tensor).collect();
        let again = header_bytes(&header(&stored, &crate::model::burnpack_tensors::others(&read)).unwrap()).unwrap();
        assert_eq!(again, bytes[..start]);
    }

    #[test]
    fn a_value_of_another_length_than_its_shape_is_refused() {
        let mut bytes = LinearConfig::new(3, 2).init(&Device::flex()).into_record().into_bytes().unwrap().to_vec();
        let at = bytes.windows(5).position(|text| text == b"shape").unwrap() + 6;
        bytes[at] += 1;
        let (header, _) = crate::model::burnpack_header::read_header(&mut bytes.as_slice()).unwrap();
        assert!(tensors(&header).unwrap_err().contains("do not fit its shape"));
    }
}
