//! Loading a model from a checkpoint: rank 0 reads one tensor after the other.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Bytes, DType, Int, Tensor, TensorData};
use burn_ddp_comm::{DType as CommDType, ProcessGroup};

use crate::file_failure::FileFailure;
use crate::intercept::{Part, bypass, parts};
use crate::model::burnpack_reader::TensorFile;
use crate::model::schema::unreadable;
use crate::tensor_conversion::data_of;
use crate::{Error, Result, agreement, main_first};

/// Returns `model` with the values of rank 0's `file`: on rank 0 all of them, on the other ranks their parts of sharded
/// parameters. *Collective*. Parameter ids do not change.
///
/// # Errors
///
/// [`Error::File`] or [`Error::Invalid`] on every rank if rank 0 cannot read a tensor, or it does not fit.
#[track_caller]
pub(super) fn load<M: Module>(group: &ProcessGroup, model: M, mut file: Option<TensorFile>, name: &str) -> Result<M> {
    let parts = bypass(|| parts(&model));
    // Applies pending updates of running statistics now, so that they are not added to the loaded ones later.
    bypass(|| drop(model.valid()));
    let whole = main_first::main_first(group, || match &mut file {
        None => Ok(model),
        Some(file) => {
            let mut load = Load { file, parts: &parts, path: Vec::new(), error: None };
            let model = bypass(|| model.map(&mut load));
            load.error.map_or(Ok(model), |e| Err(Error::file(e)))
        }
    })?;
    let model = agreement::on_outcome(group, &format!("load {name}"), whole)?;
    if parts.is_empty() {
        return Ok(model);
    }
    let mut load = LoadParts { group, file, parts, path: Vec::new(), error: None };
    let model = bypass(|| model.map(&mut load));
    load.error.map_or(Ok(model), Err)
}

/// Reads whole parameters and buffers on rank 0.
struct Load<'a> {
    file: &'a mut TensorFile,
    parts: &'a HashMap<String, Part>,
    path: Vec<String>,
    /// The first error; nothing is read after it.
    error: Option<FileFailure>,
}

impl Load<'_> {
    fn load<const D: usize, K: Basic>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let path = self.path.join(".");
        if self.error.is_some() || self.parts.contains_key(&path) {
            return param;
        }
        match self.file.tensor(&path) {
            Ok(data) => {
                let (id, dims, value) = (param.id, param.base().dims(), tensor(data, &param.base()));
                let loaded = param.transform_for_load(value, id);
                if loaded.base().dims() != dims {
                    let reason = format!("{path} is {dims:?} in the model, but {:?} here", loaded.base().dims());
                    self.error = Some(reason.into());
                }
                loaded
            }
            Err(e) => {
                self.error = Some(e);
                param
            }
        }
    }
}

/// A tensor of `data` on the device of `like`.
fn tensor<const D: usize, K: Basic>(data: TensorData, like: &Tensor<D, K>) -> Tensor<D, K> {
    match data.dtype() {
        // Data of quantized values carry their scheme.
        DType::QFloat(_) => Tensor::from_data(data, &like.device()),
        dtype => Tensor::from_data(data, (&like.device(), dtype)),
    }
}

/// Reads sharded parameters on rank 0, which sends each rank its rows.
struct LoadParts<'a> {
    group: &'a ProcessGroup,
    file: Option<TensorFile>,
    parts: HashMap<String, Part>,
    path: Vec<String>,
    /// The first error, the same on all ranks; nothing is read after it.
    error: Option<Error>,
}

impl LoadParts<'_> {
    fn rows<const D: usize>(&mut self, path: &str, part: &Part, param: &Param<Tensor<D>>) -> Result<TensorData> {
        let dtype = param.base().dtype();
        let mut whole = Bytes::from_bytes_vec(Vec::new());
        main_first::on_main(self.group, || {
            let Some(file) = &mut self.file else { return Ok(()) };
            let (_, value, mapper) = param.clone().consume();
            let loaded = mapper.on_load(tensor(file.tensor(path)?, &value.without_autodiff()));
            let (dims, is) = (loaded.dims(), loaded.dtype());
            if dims[..] != *part.dims() || is != dtype {
                let (model, here) = (part.dims(), format!("{dims:?} {is:?} here"));
                return Err(format!("{path} is {model:?} {dtype:?} in the model, but {here}").into());
            }
            let data = data_of(loaded).map_err(|e| unreadable(path, &e).to_string())?;
            whole = data.into_bytes();
            Ok(())
        })?;
        let bytes = send_rows(self.group, &whole, &part.byte_ranges(dtype.size()))?;
        Ok(TensorData::from_bytes_vec(bytes, part.own_dims(), dtype))
    }
}

/// Sends each rank its part of rank 0's `whole`: rank `r` gets the bytes at `ranges[r]`. *Collective*.
#[track_caller]
pub(super) fn send_rows(group: &ProcessGroup, whole: &[u8], ranges: &[std::ops::Range<usize>]) -> Result<Vec<u8>> {
    if group.rank() > 0 {
        let mut own = vec![0; ranges[group.rank()].len()];
        group.recv_bytes(CommDType::U8, &mut own, 0)?;
        return Ok(own);
    }
    for (rank, range) in ranges.iter().enumerate().skip(1) {
        group.send_bytes(CommDType::U8, &whole[range.clone()], rank)?;
    }
    Ok(whole[ranges[0].clone()].to_vec())
}

impl ModuleMapper for LoadParts<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let Some(part) = self.parts.get(&path).cloned().filter(|_| self.error.is_none()) else { return param };
        match self.rows(&path, &part, &param) {
            Ok(data) => param.map(|old| {
                let trains = old.is_require_grad();
                Tensor::from_data(data, (&old.device(), old.dtype())).set_require_grad(trains)
            }),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

impl ModuleMapper for Load<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.load(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.load(param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        self.load(param)
    }
}
