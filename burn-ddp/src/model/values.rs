//! Parameters and buffers of a model, each read from its device on demand, so that only one at a time is in host
//! memory.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Bytes, DType, Int, Tensor, TensorData};
use burn_ddp_comm::ProcessGroup;

use super::burnpack_tensors::StoredTensor;
use super::burnpack_writer::{Source, Write};
use super::schema::{Schema, unreadable};
use crate::Result;
use crate::file_failure::FileFailure;
use crate::intercept::{Part, bypass, parts, refuse_parts_without_tap};
use crate::tensor_conversion::data_of;

/// The parameters and buffers of `model` in traversal order, as of now. Sharded parameters are described as whole ones.
pub(crate) fn values<M: Module>(model: &M) -> Result<(Schema, Vec<Value>)> {
    refuse_parts_without_tap(model)?;
    bypass(|| {
        // `valid` brings running statistics up to date.
        let mut schema = Schema::of(model)?;
        let mut read = Read { parts: parts(model), path: Vec::new(), values: Vec::new() };
        model.valid().visit(&mut read);
        for (entry, value) in schema.entries.iter_mut().zip(&read.values) {
            if let Some(part) = &value.part {
                part.check(&entry.dims)?;
                entry.dims = part.dims().to_vec();
            }
        }
        Ok((schema, read.values))
    })
}

/// A parameter or buffer.
pub(crate) struct Value {
    pub(crate) path: String,
    id: ParamId,
    dtype: DType,
    /// This rank's part, if the parameter is sharded.
    part: Option<Part>,
    lazy: Box<dyn Lazy>,
}

impl Value {
    /// The value; for a sharded parameter, the rows of this rank.
    pub(crate) fn own(&self) -> Result<TensorData> {
        bypass(|| self.lazy.data()).map_err(|e| unreadable(&self.path, &e))
    }

    /// The whole value. *Collective* for a sharded parameter: a rank that cannot read its part ends the job.
    pub(crate) fn whole(&self) -> Result<TensorData> {
        let own = self.own();
        let Some(part) = &self.part else { return own };
        let own = own.inspect_err(|e| part.tell_peers(e))?;
        let bytes = part.gather(own.dtype().size(), own.as_bytes())?;
        Ok(TensorData::from_bytes(bytes, part.dims().to_vec(), own.dtype()))
    }

    /// True if each rank holds a part of it.
    pub(crate) fn is_sharded(&self) -> bool {
        self.part.is_some()
    }
}

impl Source for Value {
    fn stored(&self) -> Result<StoredTensor> {
        let unreadable = |e: String| unreadable(&self.path, &e);
        let dims = bypass(|| self.lazy.saved_dims(self.part.as_ref().map(Part::dims)));
        let (name, id) = (self.path.clone(), Some(self.id.val()));
        let len_of = |dtype: DType| dims.iter().product::<usize>() * dtype.size();
        let (dtype, len_bytes) = match self.dtype {
            // The data may differ from the tensor in dtype or length.
            DType::QFloat(_) | DType::Bool(_) | DType::Flex32 if self.part.is_none() => {
                let data = bypass(|| self.lazy.saved(None)).map_err(unreadable)?;
                (data.dtype(), data.as_bytes().len())
            }
            DType::Flex32 => {
                let dtype = self.own()?.dtype();
                (dtype, len_of(dtype))
            }
            dtype => (dtype, len_of(dtype)),
        };
        Ok(StoredTensor { name, dtype, dims, len_bytes, id })
    }

    fn is_on_main(&self) -> bool {
        self.part.is_none()
    }

    fn own_len_bytes(&self) -> usize {
        self.part.as_ref().map_or(0, |part| part.own_len_bytes(self.dtype.size()))
    }

    fn whole_len_bytes(&self) -> usize {
        self.part.as_ref().map_or(0, |part| part.dims().iter().product::<usize>() * self.dtype.size())
    }

    fn own(&self) -> Result<TensorData> {
        Value::own(self)
    }

    fn gather(&self, _: &ProcessGroup, own: &[u8]) -> Result<Bytes> {
        let copy = || Ok(Bytes::from_bytes_vec(own.to_vec()));
        self.part.as_ref().map_or_else(copy, |part| part.gather(self.dtype.size(), own))
    }

    fn put(&self, whole: Option<Bytes>, write: &mut Write<'_>) -> Result<(), FileFailure> {
        let dtype = if self.dtype == DType::Flex32 { DType::F32 } else { self.dtype };
        let whole = whole.zip(self.part.as_ref());
        let whole = whole.map(|(bytes, part)| TensorData::from_bytes(bytes, part.dims().to_vec(), dtype));
        let data = bypass(|| self.lazy.saved(whole)).map_err(|e| unreadable(&self.path, &e).to_string())?;
        write(data.as_bytes())
    }
}

/// A parameter or buffer of any kind and number of dimensions.
trait Lazy {
    fn data(&self) -> Result<TensorData, String>;

    /// This value, or `other` in its place, in the form that a record holds.
    fn saved(&self, other: Option<TensorData>) -> Result<TensorData, String>;

    /// Shape in a record, of this value or of one of the shape `other`.
    fn saved_dims(&self, other: Option<&[usize]>) -> Vec<usize>;
}

impl<const D: usize, K: Basic> Lazy for Param<Tensor<D, K>>
where
    Tensor<D, K>: Parameter,
{
    fn data(&self) -> Result<TensorData, String> {
        data_of(self.base())
    }

    fn saved(&self, other: Option<TensorData>) -> Result<TensorData, String> {
        let saved = match other {
            None => self.transform_for_save(),
            Some(data) => {
                let like = |value: Tensor<D, K>| Tensor::from_data(data, (&value.device(), value.dtype()));
                self.clone().map(like).transform_for_save()
            }
        };
        // Consuming the parameter moves the memory instead of copying it, if nothing else holds it.
        let (_, value, _) = saved.consume();
        data_of(value)
    }

    fn saved_dims(&self, other: Option<&[usize]>) -> Vec<usize> {
        let saved = match other.and_then(|dims| <[usize; D]>::try_from(dims).ok()) {
            None => self.transform_for_save(),
            Some(dims) => {
                let like = |value: Tensor<D, K>| Tensor::empty(dims, (&value.device(), value.dtype()));
                self.clone().map(like).transform_for_save()
            }
        };
        saved.base().dims().to_vec()
    }
}

struct Read {
    parts: HashMap<String, Part>,
    path: Vec<String>,
    values: Vec<Value>,
}

impl Read {
    fn push<const D: usize, K: Basic + 'static>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        let path = self.path.join(".");
        let (id, dtype, part) = (param.id, param.base().dtype(), self.parts.remove(&path));
        self.values.push(Value { path, id, dtype, part, lazy: Box::new(param.clone()) });
    }
}

impl ModuleVisitor for Read {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.push(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.push(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.push(param);
    }
}
