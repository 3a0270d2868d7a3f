//! Gradients averaged in front of the optimizer, as Horovod does, for models that are not wrapped.

use std::collections::HashMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Tensor, TensorData};

use crate::ddp::Ddp;
use crate::model::schema::{Schema, digest, unreadable};
use crate::tensor_conversion::{burn_dtype, comm_dtype, data_of};
use crate::{Error, Result, agreement, intercept};

/// Bytes of a reduction, unless one parameter alone is larger.
const BUCKET_BYTES: usize = 1 << 20;

/// Averages the gradients of all ranks before each step of the optimizer in it, like Horovod's `DistributedOptimizer`.
///
/// For a loop whose model is not [wrapped](Ddp::wrap). `wrap` reduces while backward goes on, weighs ranks by their
/// items and compares replicas; this reduces after backward, counts each rank alike, except one whose batches from a
/// [loader](Ddp::loader) all weigh 0 since its last step, and compares nothing. Start from
/// equal parameters ([`broadcast_parameters`](crate::Collectives::broadcast_parameters)). To accumulate, collect with
/// Burn's `GradientsAccumulator` and step once.
///
/// # Example
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::prelude::*;
/// use burn_ddp::DistributedOptimizer;
/// use burn_ddp::prelude::*;
///
/// let hashes = Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let mut model = ddp.broadcast_parameters(LinearConfig::new(2, 1).init(&device), 0)?;
///     let mut optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
///     for step in 0..3 {
///         let x = Tensor::<2>::full([4, 2], (ddp.rank() + step) as f32, &device); // this rank's data
///         let grads = model.forward(x).powf_scalar(2.0).mean().backward();
///         let grads = GradientsParams::from_grads(grads, &model);
///         model = optim.step(0.01, model, grads);
///     }
///     Ok(param_hash(&model)?)
/// })?;
/// assert_eq!(hashes[0], hashes[1]);
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone)]
pub struct DistributedOptimizer {
    ddp: Ddp,
    optim: ModuleOptimizer,
}

impl std::fmt::Debug for DistributedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DistributedOptimizer").field("ddp", &self.ddp).finish_non_exhaustive()
    }
}

impl DistributedOptimizer {
    /// Takes any optimizer of Burn's that steps on gradients, with its groups and clipping, which see averages.
    #[must_use]
    pub fn new(ddp: &Ddp, optim: ModuleOptimizer) -> Self {
        DistributedOptimizer { ddp: ddp.clone(), optim }
    }

    /// The optimizer in it, for checkpoints.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::SgdConfig};
    /// # use burn_ddp::prelude::*;
    /// # use burn_ddp::DistributedOptimizer;
    /// # let directory = tempfile::tempdir()?;
    /// # let directory = directory.path();
    /// Ddp::spawn(2, |ddp| {
    ///     let model = LinearConfig::new(2, 1).init(&ddp.device()?.autodiff());
    ///     let optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
    ///     Ok(ddp.checkpoints(directory)?.save(1, |c| {
    ///         c.model(&model)?;
    ///         c.optimizer(optim.optimizer(), &model)
    ///     })?)
    /// })?;
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optim
    }

    /// The optimizer in it, for [`broadcast_optimizer_state`](crate::Collectives::broadcast_optimizer_state).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::SgdConfig};
    /// # use burn_ddp::prelude::*;
    /// # use burn_ddp::DistributedOptimizer;
    /// Ddp::spawn(2, |ddp| {
    ///     let model = LinearConfig::new(2, 1).init(&ddp.device()?.autodiff());
    ///     let model = ddp.broadcast_parameters(model, 0)?;
    ///     let mut optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
    ///     Ok(ddp.broadcast_optimizer_state(optim.optimizer_mut(), &model, 0)?) // of a rank 0 that was resumed
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn optimizer_mut(&mut self) -> &mut ModuleOptimizer {
        &mut self.optim
    }

    /// Averages `grads` over the ranks, and steps with the averages. *Collective*; the signature is that of
    /// `ModuleOptimizer::step`.
    ///
    /// Each rank passes its own gradients and holds the same parameters after. A gradient that only some ranks have
    /// counts as zeros on the others; a parameter without a gradient on any rank stays as it is.
    ///
    /// Costs small exchanges of which gradients there are, and one all-reduce for each 1 MiB of gradients: two steps in
    /// which a rank sends about `2 b` bytes for `b` bytes.
    ///
    /// # Panics
    ///
    /// Where [`try_step`](DistributedOptimizer::try_step) returns an error, with its text.
    #[track_caller]
    pub fn step<M: Module>(&mut self, lr: impl Into<ModuleLearningRate>, model: M, grads: GradientsParams) -> M {
        match self.try_step(lr, model, grads) {
            Ok(model) => model,
            Err(error) => panic!("{error}"),
        }
    }

    /// [`step`](DistributedOptimizer::step) with failures as errors. *Collective*.
    ///
    /// # Errors
    ///
    /// On every rank, and nothing has changed: [`Error::Invalid`] if a rank's model is wrapped, so that its gradients
    /// are averages already; [`Error::ModelsDiffer`]; [`Error::Comm`] if a peer failed.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, optim::SgdConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// use burn_ddp::DistributedOptimizer;
    ///
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = ddp.wrap(LinearConfig::new(2, 1).init(&device))?; // a bug: its gradients are averages
    ///     let mut optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
    ///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    ///     let grads = ddp.backward(&loss, &model)?.expect("a step");
    ///     assert!(matches!(optim.try_step(0.01, model, grads), Err(burn_ddp::Error::Invalid { .. })));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn try_step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        mut grads: GradientsParams,
    ) -> Result<M> {
        let averages = self.average(&model, &mut grads)?;
        model.visit(&mut Put { averages, grads: &mut grads });
        Ok(self.optim.step(lr, model, grads))
    }

    #[track_caller]
    fn average<M: Module>(&self, model: &M, grads: &mut GradientsParams) -> Result<HashMap<ParamId, TensorData>> {
        let help = "it averages over processes after each batch; `ddp.wrap` the model instead";
        self.ddp.state().leaves.refuse_several("a `DistributedOptimizer`", help)?;
        let group = self.ddp.group();
        let (schema, taken) = agreement::on_outcome(group, "average gradients", take(model, grads))?;
        let present: Vec<bool> = taken.iter().map(Option::is_some).collect();
        let counts = self.ddp.state().batch_weight.note_optimizer_step();
        let stop = &self.ddp.state().stop;
        let all = group.all_gather_object(&(digest(&schema.entries), present, counts, stop.is_wished()))?;
        stop.agree(all.iter().any(|(.., wished)| *wished));
        // Ranks that all do not count count alike.
        let counts = counts || all.iter().all(|(_, _, counts, _)| !counts);
        if all.iter().any(|(digest, ..)| *digest != all[0].0) {
            agreement::on_model(group, &schema.entries)?;
        }
        let mut gradients = Vec::new();
        for (i, mine) in taken.into_iter().enumerate().filter(|(i, _)| all.iter().any(|(_, present, ..)| present[*i])) {
            let (dims, dtype) = (&schema.entries[i].dims, schema.dtypes[i]);
            gradients.push((schema.ids[i], mine.unwrap_or_else(|| zeros(dims, dtype))));
        }
        let mut rest = gradients.as_mut_slice();
        while !rest.is_empty() {
            let (bucket, after) = rest.split_at_mut(bucket_len(rest));
            self.reduce(bucket, counts)?;
            rest = after;
        }
        Ok(gradients.into_iter().collect())
    }

    /// Replaces gradients of one dtype by their means over the ranks whose gradients count.
    #[track_caller]
    fn reduce(&self, bucket: &mut [(ParamId, TensorData)], counts: bool) -> Result<()> {
        let Some(dtype) = bucket.first().and_then(|(_, data)| comm_dtype(data.dtype())) else { return Ok(()) };
        let mut bytes = Vec::new();
        bucket.iter().for_each(|(_, data)| bytes.extend_from_slice(data.as_bytes()));
        self.ddp.group().all_reduce_weighted_bytes(dtype, &mut bytes, f64::from(u8::from(counts)), 0)?;
        let mut rest = bytes.as_slice();
        for (_, data) in bucket {
            let (own, after) = rest.split_at(data.as_bytes().len());
            *data = TensorData::from_bytes_vec(own.to_vec(), data.shape().clone(), burn_dtype(dtype));
            rest = after;
        }
        Ok(())
    }
}

fn zeros(dims: &[usize], dtype: DType) -> TensorData {
    let bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
    TensorData::from_bytes_vec(bytes, dims.to_vec(), dtype)
}

/// Number of gradients, from the first on, that travel in one reduction.
fn bucket_len(gradients: &[(ParamId, TensorData)]) -> usize {
    let (mut bytes, dtype) = (0, gradients[0].1.dtype());
    let fits = |(_, data): &&(ParamId, TensorData)| {
        bytes += data.as_bytes().len();
        data.dtype() == dtype && bytes <= BUCKET_BYTES
    };
    gradients.iter().take_while(fits).count().max(1)
}

/// Schema of the model, and this rank's gradient of each of its entries.
fn take<M: Module>(model: &M, grads: &mut GradientsParams) -> Result<(Schema, Vec<Option<TensorData>>)> {
    if !intercept::find(model).is_empty() {
        return Err(Error::invalid(
            "the model is wrapped, so its gradients are averages already: step with the plain optimizer, or \
             `ddp.unwrap` the model",
        ));
    }
    let schema = Schema::of(model)?;
    let mut take = Take { grads, taken: HashMap::new(), error: None };
    model.visit(&mut take);
    let Take { mut taken, error, .. } = take;
    error.map_or(Ok(()), Err)?;
    // Clones of a parameter have one gradient.
    let taken = schema.ids.iter().map(|id| taken.remove(id)).collect::<Vec<_>>();
    for (i, data) in taken.iter().enumerate() {
        if let Some(data) = data.as_ref().filter(|data| data.dtype() != schema.dtypes[i]) {
            let (path, dtype) = (&schema.entries[i].path, schema.dtypes[i]);
            return Err(Error::invalid(format!("{path} is {dtype:?}, but its gradient is {:?}", data.dtype())));
        }
    }
    Ok((schema, taken))
}

struct Take<'a> {
    grads: &'a mut GradientsParams,
    taken: HashMap<ParamId, TensorData>,
    error: Option<Error>,
}

impl ModuleVisitor for Take<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match self.grads.remove::<D>(param.id).map(data_of) {
            Some(Ok(data)) => drop(self.taken.insert(param.id, data)),
            Some(Err(e)) => self.error = Some(unreadable("a gradient", &e)),
            None => {}
        }
    }
}

struct Put<'a> {
    averages: HashMap<ParamId, TensorData>,
    grads: &'a mut GradientsParams,
}

impl ModuleVisitor for Put<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(data) = self.averages.remove(&param.id) {
            let (device, dtype) = (param.base().device().without_autodiff(), data.dtype());
            self.grads.register(param.id, Tensor::<D>::from_data(data, (&device, dtype)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Collectives;
    use crate::param_hash;
    use burn::module::ModuleMapper;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamConfig, SgdConfig};
    use burn::tensor::Device;

    #[derive(burn::module::Module, Debug)]
    struct Two {
        a: Linear,
        b: Linear,
        unused: Linear,
    }

    fn model(device: &Device) -> Two {
        let init = |i, o| LinearConfig::new(i, o).init(device);
        // `b` fills a bucket by itself.
        Two { a: init(4, 600), b: init(600, 500), unused: init(2, 2) }
    }

    fn rows(from: usize, n: usize, device: &Device) -> Tensor<2> {
        let values: Vec<f32> = (from * 4..(from + n) * 4).map(|i| (i as f32 * 0.37).sin()).collect();
        Tensor::from_data(TensorData::new(values, [n, 4]), device)
    }

    /// The gradients that this rank's rows of a step give; rank 1 passes `b` by in odd steps.
    fn gradients(model: &Two, step: usize, from: usize, n: usize, skip_b: bool, device: &Device) -> GradientsParams {
        let hidden = model.a.forward(rows(step * 4 + from, n, device)).tanh();
        let loss =
            if skip_b { hidden.powf_scalar(2.0).mean() } else { model.b.forward(hidden).powf_scalar(2.0).mean() };
        GradientsParams::from_grads(loss.backward(), model)
    }

    #[test]
    fn two_ranks_step_as_one_that_has_all_rows() {
        let device = Device::flex().autodiff();
        let origin = model(&device);
        param_hash(&origin).unwrap(); // the values are there
        let alone = |steps| {
            let (mut optim, mut model) = (SgdConfig::new().init(), origin.clone());
            for step in 0..steps {
                let grads = gradients(&model, step, 0, 4, false, &device);
                model = optim.step(0.1, model, grads);
            }
            model
        };
        let ranks = Ddp::spawn(2, |ddp| {
            let mut model = ddp.broadcast_parameters(origin.clone(), 0)?;
            let mut optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
            for step in 0..3 {
                let grads = gradients(&model, step, ddp.rank() * 2, 2, false, &device);
                model = optim.step(0.1, model, grads);
            }
            let close = model.b.weight.val().into_data();
            Ok((param_hash(&model)?, close))
        })
        .unwrap();
        assert_eq!(ranks[0].0, ranks[1].0);
        let tolerance = burn::tensor::Tolerance::<f32>::absolute(1e-6);
        alone(3).b.weight.val().into_data().assert_approx_eq(&ranks[0].1, tolerance);
    }

    #[test]
    fn what_one_rank_did_not_use_counts_as_zeros_and_what_none_used_stays() {
        let device = Device::flex().autodiff();
        let ranks = Ddp::spawn(2, |ddp| {
            let mut model = ddp.broadcast_parameters(model(&device), 1)?;
            let unused = model.unused.weight.val().into_data();
            let mut optim = DistributedOptimizer::new(&ddp, AdamConfig::new().init());
            for step in 0..4 {
                let grads = gradients(&model, step, ddp.rank() * 2, 2, ddp.rank() == 1 && step % 2 == 1, &device);
                model = optim.try_step(0.1, model, grads)?;
            }
            assert_eq!(model.unused.weight.val().into_data(), unused);
            Ok((param_hash(&model)?, optim.optimizer().to_record().len()))
        })
        .unwrap();
        assert_eq!(ranks[0], ranks[1]);
        assert_eq!(ranks[0].1, 8, "two moments of four parameters");
    }

    #[test]
    fn wrapped_or_different_models_are_an_error_on_every_rank() {
        let device = Device::flex().autodiff();
        let ranks = Ddp::spawn(2, |ddp| {
            let mut optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
            let wrapped = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
            let wrapped = optim.try_step(0.1, wrapped, GradientsParams::new()).unwrap_err().to_string();
            let other = LinearConfig::new(2 + ddp.rank(), 1).init(&device);
            let other = optim.try_step(0.1, other, GradientsParams::new()).unwrap_err().to_string();
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let model = LinearConfig::new(2 + ddp.rank(), 1).init(&device);
                optim.step(0.1, model, GradientsParams::new())
            }));
            Ok((wrapped, other, panic.is_err()))
        })
        .unwrap();
        for (wrapped, other, panicked) in ranks {
            assert!(wrapped.contains("averages already"), "{wrapped}");
            assert!(other.contains("weight is [2, 1] f32 on rank 0, but [3, 1] f32 on rank 1"), "{other}");
            assert!(panicked);
        }
    }

    #[test]
    fn dtypes_side_by_side_have_buckets_of_their_own() {
        struct Half(usize);
        impl ModuleMapper for Half {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                self.0 += 1;
                if self.0.is_multiple_of(2) {
                    param.map(|t| Tensor::from_inner(t.inner().cast(DType::F64)).require_grad())
                } else {
                    param
                }
            }
        }
        let device = Device::flex().autodiff();
        let ranks = Ddp::spawn(2, |ddp| {
            let mut model = ddp.broadcast_parameters(model(&device).map(&mut Half(0)), 0)?;
            let mut grads = GradientsParams::new();
            let plain = device.clone().without_autodiff();
            let r = ddp.rank() as f32;
            grads.register(model.a.weight.id, Tensor::<2>::full([4, 600], r, (&plain, DType::F32)));
            grads.register(model.a.bias.as_ref().unwrap().id, Tensor::<1>::full([600], r, (&plain, DType::F64)));
            let mut optim = DistributedOptimizer::new(&ddp, SgdConfig::new().init());
            let before = model.a.weight.val();
            model = optim.try_step(1.0, model, grads)?;
            let moved = (before - model.a.weight.val()).mean().into_scalar::<f32>();
            assert!((moved - 0.5).abs() < 1e-3, "{moved}");
            Ok(param_hash(&model)?)
        })
        .unwrap();
        assert_eq!(ranks[0], ranks[1]);
    }
}
