//! Description of a model: paths, shapes and dtypes of its parameters and buffers.

use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::tensor_conversion::{comm_dtype, data_of};
use crate::{Error, Result};

/// One parameter or buffer of a model, without its values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub path: String,
    pub dims: Vec<usize>,
    pub dtype: String,
    pub trainable: bool,
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} {}{}", self.path, self.dims, self.dtype, if self.trainable { "" } else { " (no gradient)" })
    }
}

/// Parameters and buffers of a model, in traversal order.
#[derive(Debug, Default)]
pub(crate) struct Schema {
    pub entries: Vec<Entry>,
    pub dtypes: Vec<DType>,
    /// Burn's ids, which differ between ranks.
    pub ids: Vec<ParamId>,
    /// True if Burn's `visit_float` yields it: float parameters, quantized ones, and running statistics.
    pub is_float: Vec<bool>,
}

/// Values and schema of a model in traversal order.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub schema: Schema,
    pub values: Vec<TensorData>,
}

impl Schema {
    /// Describes every parameter and buffer of `model`, without reading values.
    pub(crate) fn of<M: Module>(model: &M) -> Result<Self> {
        Ok(read(model, |_| false)?.0)
    }

    /// Paths of all entries.
    pub(crate) fn paths(&self) -> Vec<&str> {
        self.entries.iter().map(|entry| entry.path.as_str()).collect()
    }

    /// Entries that all ranks hold alike: those that are not local.
    pub(crate) fn shared(&self, is_local: &[bool]) -> Vec<Entry> {
        let entries = self.entries.iter().zip(is_local);
        entries.filter(|(_, is_local)| !**is_local).map(|(entry, _)| entry.clone()).collect()
    }

    /// The elements of `of_entries`, which has one per entry, for the entries that `visit_float` yields.
    pub(crate) fn floats<'a, T: Copy>(&'a self, of_entries: &'a [T]) -> impl Iterator<Item = T> + 'a {
        of_entries.iter().zip(&self.is_float).filter_map(|(of_entry, is_float)| is_float.then_some(*of_entry))
    }

    /// For each entry the first entry that is the same `Param`: a clone of it that has not changed since (tied
    /// weights). A clone that was frozen or trained apart (a target network) is a parameter of its own.
    pub(crate) fn first_clones<M: Module>(&self, model: &M) -> Result<Vec<usize>> {
        let mut by_id: HashMap<ParamId, Vec<usize>> = HashMap::new();
        self.ids.iter().enumerate().for_each(|(i, id)| by_id.entry(*id).or_default().push(i));
        let mut first: Vec<usize> = (0..self.ids.len()).collect();
        by_id.retain(|_, clones| clones.len() > 1);
        if by_id.is_empty() {
            return Ok(first);
        }
        let (_, values) = read(model, |i| by_id.contains_key(&self.ids[i]))?;
        for clones in by_id.values() {
            for (nth, &i) in clones.iter().enumerate() {
                let same = |&&a: &&usize| {
                    self.entries[a].trainable == self.entries[i].trainable && values.get(&a) == values.get(&i)
                };
                first[i] = clones[..nth].iter().find(same).map_or(i, |&earlier| first[earlier]);
            }
        }
        Ok(first)
    }
}

/// SHA-256 of entries: ranks with equal models need to exchange 32 bytes only.
pub(crate) fn digest(entries: &[Entry]) -> [u8; 32] {
    let mut sha = Sha256::new();
    for entry in entries {
        let line = entry.to_string();
        sha.update((line.len() as u64).to_le_bytes());
        sha.update(line);
    }
    sha.finalize().into()
}

/// The first rank whose model differs from the model of the first rank, and the first difference between the two
/// models. `ranks[n]` is the rank of the n-th model.
pub(crate) fn difference(models: &[Vec<Entry>], ranks: &[usize]) -> Option<(usize, String)> {
    let (first, main) = (models.first()?, *ranks.first()?);
    let (&rank, other) = ranks.iter().zip(models).find(|(_, model)| *model != first)?;
    let text = match first.iter().zip(other).find(|(a, b)| a != b) {
        Some((a, b)) if a.path == b.path => {
            format!(
                "{} is {:?} {}{} on rank {main}, but {:?} {}{} on rank {rank}",
                a.path,
                a.dims,
                a.dtype,
                grad(a),
                b.dims,
                b.dtype,
                grad(b)
            )
        }
        Some((a, b)) => format!("where rank {main} has {a}, rank {rank} has {b}"),
        None => {
            let (long, holder, lacking) =
                if first.len() > other.len() { (first, main, rank) } else { (other, rank, main) };
            let extra = &long[first.len().min(other.len())];
            format!(
                "rank {main} has {} parameters and buffers, rank {rank} has {}: {extra} of rank {holder} is missing on \
                 rank {lacking}",
                first.len(),
                other.len()
            )
        }
    };
    Some((rank, text))
}

/// The paths of `entries`; long lists are cut.
pub(crate) fn list_paths<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> String {
    const SHOWN: usize = 6;
    let paths: Vec<&str> = entries.into_iter().map(|entry| entry.path.as_str()).collect();
    let shown = paths[..paths.len().min(SHOWN)].join(", ");
    match paths.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn grad(e: &Entry) -> &'static str {
    if e.trainable { "" } else { " without gradient" }
}

/// The schema of a model, and the values of those entries that are `wanted`.
fn read<M: Module>(model: &M, wanted: impl Fn(usize) -> bool) -> Result<(Schema, BTreeMap<usize, TensorData>)> {
    let mut reader =
        Reader { wanted, path: Vec::new(), schema: Schema::default(), values: BTreeMap::new(), error: None };
    model.visit(&mut reader);
    match reader.error {
        Some(e) => Err(e),
        None => Ok((reader.schema, reader.values)),
    }
}

struct Reader<W> {
    wanted: W,
    path: Vec<String>,
    schema: Schema,
    values: BTreeMap<usize, TensorData>,
    error: Option<Error>,
}

impl<W: Fn(usize) -> bool> Reader<W> {
    fn read<const D: usize, K: Basic>(&mut self, id: ParamId, tensor: Tensor<D, K>, trainable: bool, is_float: bool) {
        if self.error.is_some() {
            return;
        }
        let path = self.path.join(".");
        let (dims, dtype, nth) = (tensor.dims().to_vec(), tensor.dtype(), self.schema.entries.len());
        if trainable && comm_dtype(dtype).is_none() {
            self.error =
                Some(Error::invalid(format!("{path} has dtype {dtype:?}, whose gradients burn-ddp cannot reduce")));
            return;
        }
        if (self.wanted)(nth) {
            match data_of(tensor) {
                Ok(data) => drop(self.values.insert(nth, data)),
                Err(e) => {
                    self.error = Some(unreadable(&path, &e));
                    return;
                }
            }
        }
        self.schema.entries.push(Entry { path, dims, dtype: format!("{dtype:?}").to_lowercase(), trainable });
        self.schema.dtypes.push(dtype);
        self.schema.ids.push(id);
        self.schema.is_float.push(is_float);
    }
}

/// The error of a value that cannot be read.
pub(crate) fn unreadable(path: &str, e: &str) -> Error {
    Error::Unreadable { reason: format!("reading {path} from its device failed: {e}") }
}

impl<W: Fn(usize) -> bool> ModuleVisitor for Reader<W> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.read(param.id, param.base(), param.is_require_grad(), true);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.read(param.id, param.base(), false, false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.read(param.id, param.base(), false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, dims: &[usize]) -> Entry {
        Entry { path: path.into(), dims: dims.to_vec(), dtype: "f32".into(), trainable: true }
    }

    #[test]
    fn the_first_difference_is_named_with_both_sides() {
        let a = vec![entry("fc.weight", &[4, 8]), entry("fc.bias", &[8])];
        assert_eq!(difference(&[a.clone(), a.clone()], &[0, 1]), None);
        let mut b = a.clone();
        b[0].dims = vec![4, 9];
        assert_eq!(
            difference(&[a.clone(), a.clone(), b], &[0, 1, 2]).unwrap(),
            (2, "fc.weight is [4, 8] f32 on rank 0, but [4, 9] f32 on rank 2".into())
        );
        let mut c = a.clone();
        c.push(entry("extra", &[1]));
        let (_, text) = difference(&[a.clone(), c], &[0, 1]).unwrap();
        assert_eq!(
            text,
            "rank 0 has 2 parameters and buffers, rank 1 has 3: extra [1] f32 of rank 1 is missing on rank 0"
        );
        let mut d = a.clone();
        d[1].path = "fc.b".into();
        assert_eq!(
            difference(&[a, d], &[0, 1]).unwrap().1,
            "where rank 0 has fc.bias [8] f32, rank 1 has fc.b [8] f32"
        );
    }
}
