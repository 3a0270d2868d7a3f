//! Copying one rank's parameters and buffers to all ranks.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::Location;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType as BurnDType, Device, Int, Tensor, TensorData};
use burn_ddp_comm::{ProcessGroup, attribute_calls};

use super::running_stats;
use super::schema::{Schema, unreadable};
use crate::agreement::tell_peers;
use crate::ddp::Ddp;
use crate::intercept::{bypass, find, refuse_parts_without_tap, replace, sharded_paths};
use crate::tensor_conversion::data_of;
use crate::{Error, Result, agreement, chunked_broadcast};

/// Copies `root`'s parameters and buffers to all ranks, in a model that is wrapped or not. Parameter ids do not change,
/// nor do local parameters of a wrapped model. *Collective*.
///
/// # Errors
///
/// On every rank: [`Error::ModelsDiffer`]; [`Error::Comm`] if a peer failed or `root` is no rank.
#[track_caller]
pub(crate) fn model<M: Module>(ddp: &Ddp, model: M, root: usize) -> Result<M> {
    let group = ddp.group();
    let mine = bypass(|| {
        refuse_parts_without_tap(&model)?;
        // What `visit` shows of running statistics lags one update behind; `valid` brings it up to date.
        drop(model.valid());
        let schema = Schema::of(&model)?;
        let wrapped = find(&model);
        // A sharded parameter has one value, and each rank keeps its part of it.
        let sharded = sharded_paths(&model);
        let is_kept = |(path, id): (&str, &ParamId)| {
            sharded.contains(path) || wrapped.iter().any(|wrapped| wrapped.is_local(path, *id))
        };
        let is_local: Vec<bool> = schema.paths().into_iter().zip(&schema.ids).map(is_kept).collect();
        Ok((schema.first_clones(&model)?, is_local, schema))
    });
    let (first_clone, is_local, schema) = agreement::on_outcome(group, "broadcast its model", mine)?;
    agreement::on_model(group, &schema.shared(&is_local))?;
    let first_clone = first_clones(group, root, first_clone, &is_local)?;
    let trains = model.devices().iter().any(Device::is_autodiff);
    let devices = devices(&model);
    // Ranks that are threads may have started from one model, whose clones share running statistics.
    let model = if trains && find(&model).is_empty() { running_stats::unshared(model) } else { model };
    let source = (group.world_size() > 1).then_some((ddp, group, root));
    let site = Location::caller();
    let model = attribute_calls(site, || replace(|| values(model, source, devices, &schema, first_clone, &is_local)))?;
    find(&model).iter().for_each(|wrapped| wrapped.keep_statistics(true));
    Ok(model)
}

/// For each entry the first entry of which it is a clone, on the root: all ranks get the root's values, so the root's
/// clones are equal on all ranks. For local entries, which may be missing on other ranks, it is this rank's.
/// *Collective*.
#[track_caller]
pub(crate) fn first_clones(
    group: &ProcessGroup,
    root: usize,
    own: Vec<usize>,
    is_local: &[bool],
) -> Result<Vec<usize>> {
    let shared: Vec<usize> = (0..own.len()).filter(|entry| !is_local[*entry]).collect();
    let place = |entry: &usize| shared.binary_search(&own[*entry]).expect("clones of what is shared are shared");
    let of_root: Vec<usize> = group.broadcast_object(Some(shared.iter().map(place).collect()), root)?;
    let mut first_clone = own;
    for (entry, first) in shared.iter().zip(of_root) {
        first_clone[*entry] = shared[first];
    }
    Ok(first_clone)
}

/// Device of each parameter and buffer of `model`, in traversal order, with its checkpointing strategy.
pub(crate) fn devices<M: Module>(model: &M) -> Vec<Device> {
    struct Devices(Vec<Device>);
    impl ModuleVisitor for Devices {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().device());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            self.0.push(param.base().device());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            self.0.push(param.base().device());
        }
    }
    let mut devices = Devices(Vec::new());
    bypass(|| model.visit(&mut devices));
    devices.0
}

/// `model` with the root's values on `devices`, as fresh leaves. Without a `root`, and for entries that are `is_local`,
/// it keeps this rank's values. *Collective* over the root's group.
#[track_caller]
pub(crate) fn values<M: Module>(
    model: M,
    root: Option<(&Ddp, &ProcessGroup, usize)>,
    devices: Vec<Device>,
    schema: &Schema,
    first_clone: Vec<usize>,
    is_local: &[bool],
) -> Result<M> {
    let (paths, devices, leaves) = (schema.paths(), devices.into(), HashMap::new());
    let mut broadcast = Broadcast { root, devices, paths, first_clone, is_local, leaves, next: 0, error: None };
    let model = model.map(&mut broadcast);
    broadcast.error.map_or(Ok(model), Err)
}

/// Replaces every value by the root's, as a fresh leaf, since ranks that are threads must not share autodiff nodes.
/// Values are replaced one at a time, and each old value is freed before (unless something else holds it), so that no
/// second copy of the model is needed.
struct Broadcast<'a> {
    /// The handle, the group, and the rank in it whose values replace all others'; `None` in a world of 1.
    root: Option<(&'a Ddp, &'a ProcessGroup, usize)>,
    /// Device of each value, with the checkpointing strategy.
    devices: VecDeque<Device>,
    paths: Vec<&'a str>,
    /// See [`Schema::first_clones`].
    first_clone: Vec<usize>,
    is_local: &'a [bool],
    /// Leaves by entry, so that clones of a `Param` go on sharing theirs.
    leaves: HashMap<usize, Box<dyn Any>>,
    next: usize,
    /// The first error; nothing is broadcast after it.
    error: Option<Error>,
}

impl Broadcast<'_> {
    fn value<const D: usize, K: Basic>(&mut self, old: Tensor<D, K>) -> Tensor<D, K> {
        let device = self.devices.pop_front().expect("map and visit see the same parameters");
        let (path, is_local) = (self.paths[self.next], self.is_local[self.next]);
        self.next += 1;
        if self.error.is_some() {
            return old;
        }
        let dims = old.dims();
        let own = data_of(old).map_err(|e| unreadable(path, &e)).inspect_err(|e| {
            // The other ranks wait in the broadcast of this value.
            self.root.iter().for_each(|(ddp, ..)| tell_peers(ddp, e));
        });
        let values = own.and_then(|data| if is_local { Ok(data) } else { self.broadcast(data) });
        match values {
            // Data of quantized values carry their scheme.
            Ok(data) => match data.dtype() {
                BurnDType::QFloat(_) => Tensor::from_data(data, &device),
                dtype => Tensor::from_data(data, (&device, dtype)),
            },
            Err(e) => {
                self.error = Some(e);
                Tensor::empty(dims, &device)
            }
        }
    }

    /// The root's `data` on every rank.
    fn broadcast(&self, data: TensorData) -> Result<TensorData> {
        let Some((_, group, root)) = self.root else { return Ok(data) };
        if group.rank() == root {
            chunked_broadcast::send(group, data.as_bytes())?;
            return Ok(data);
        }
        let (shape, dtype, len) = (data.shape().clone(), data.dtype(), data.as_bytes().len());
        drop(data);
        Ok(TensorData::from_bytes_vec(chunked_broadcast::receive(group, len, root)?, shape, dtype))
    }
}

impl ModuleMapper for Broadcast<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let first = self.first_clone[self.next];
        param.map(|old| {
            let requires_grad = old.is_require_grad();
            let fresh = self.value(old);
            let fresh = if requires_grad { fresh.require_grad() } else { fresh };
            let leaf = self.leaves.entry(first).or_insert_with(|| Box::new(fresh.clone()));
            leaf.downcast_ref::<Tensor<D>>().cloned().unwrap_or(fresh)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|old| self.value(old))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|old| self.value(old))
    }
}
