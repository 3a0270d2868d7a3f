//! One rank's run of a case: its data, its model's values, its outcome.

use std::cell::RefCell;
use std::ops::Range;

use anyhow::{Result, ensure};
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_ddp::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{number, rows, values, widest};

/// Number of parts of a global batch, which the ranks share; divisible by every world size of the tests.
pub const PARTS: usize = 6;
/// Rows of a part.
const ROWS: usize = 2;
/// Columns of a row.
const COLUMNS: usize = 6;

/// One rank in one case.
pub struct Run {
    /// The rank. A world of 1 is the oracle: plain Burn with the whole batch.
    pub ddp: Ddp,
    /// With autodiff.
    pub device: Device,
    /// Type of parameters and data.
    pub dtype: DType,
    /// True if parameters are sharded.
    sharded: bool,
    /// True if every rank has the whole batch.
    on_all_data: bool,
    /// Initial values of the models, to check that training moved them.
    started: RefCell<Vec<Vec<f64>>>,
}

/// Outcome of a case on a rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Hash of all models of the case.
    pub hash: String,
    /// All parameters and buffers; empty if there is nothing to compare with the oracle.
    pub values: Vec<Vec<f64>>,
    /// Largest relative difference from the oracle, norm-wise per tensor.
    pub tolerance: f64,
}

impl Outcome {
    /// The outcome of a case that has made its assertions on each rank and leaves nothing to compare.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// The outcome with another tolerance: for narrow dtypes, and for trainings that amplify rounding.
    #[must_use]
    pub fn within(mut self, tolerance: f64) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// The outcome of the models of both.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.hash += &other.hash;
        self.values.extend(other.values);
        self
    }
}

impl Run {
    /// A run in f64, or in f32 on devices that have no f64.
    pub fn new(ddp: &Ddp) -> Result<Self> {
        let device = ddp.device()?.autodiff();
        let dtype = widest(&device);
        Ok(Run { ddp: ddp.clone(), device, dtype, sharded: false, on_all_data: false, started: RefCell::default() })
    }

    /// The run with every parameter sharded that can be.
    #[must_use]
    pub fn sharded(self) -> Self {
        Run { sharded: true, ..self }
    }

    /// The run with the whole batch on every rank.
    #[must_use]
    pub fn on_all_data(self) -> Self {
        Run { on_all_data: true, ..self }
    }

    /// A run of the same rank in another dtype.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> Self {
        let (ddp, device) = (self.ddp.clone(), self.device.clone());
        let (sharded, on_all_data) = (self.sharded, self.on_all_data);
        Run { ddp, device, dtype, sharded, on_all_data, started: RefCell::default() }
    }

    /// True for the run with which the others are compared: plain Burn on one rank.
    pub fn is_oracle(&self) -> bool {
        self.ddp.world_size() == 1
    }

    /// This rank's parts of the batch.
    pub fn parts(&self) -> Range<usize> {
        if self.on_all_data {
            return 0..PARTS;
        }
        let n = PARTS / self.ddp.world_size();
        self.ddp.rank() * n..(self.ddp.rank() + 1) * n
    }

    /// Rows of one part of the batch of `step`, `[2, 6]`.
    pub fn x(&self, step: usize, part: usize) -> Tensor<2> {
        rows((step * PARTS + part) * ROWS, ROWS, COLUMNS, 1, self.dtype, &self.device)
    }

    /// All rows of this rank, `[12 / world, 6]`.
    pub fn batch(&self, step: usize) -> Tensor<2> {
        let parts = self.parts();
        rows((step * PARTS + parts.start) * ROWS, parts.len() * ROWS, COLUMNS, 1, self.dtype, &self.device)
    }

    /// Scales a sum over this rank's items to a loss: the mean of all ranks' losses is the sum over all items / 8, in
    /// exact arithmetic.
    pub fn scale(&self, sum: Tensor<1>) -> Tensor<1> {
        let shares = if self.on_all_data { 1 } else { self.ddp.world_size() };
        sum * (shares as f64 / 8.0)
    }

    /// [`Run::scale`] of the sum of `loss` over this rank's parts of the batch.
    pub fn over_parts(&self, loss: impl FnMut(usize) -> Tensor<1>) -> Tensor<1> {
        let sum = self.parts().map(loss).reduce(|a, b| a + b);
        self.scale(sum.expect("every rank has a part"))
    }

    /// Gives every trainable parameter values that depend only on its place in the model, and all float parameters this
    /// run's dtype. Ranks other than 0 get different values, which `wrap` has to replace.
    pub fn fill<M: Module>(&self, model: M) -> M {
        self.fill_as(model, Some(self.dtype))
    }

    /// [`Run::fill`] in another dtype; for `None` every parameter keeps its own.
    pub fn fill_as<M: Module>(&self, model: M, dtype: Option<DType>) -> M {
        struct Fill {
            salt: u64,
            dtype: Option<DType>,
        }
        impl ModuleMapper for Fill {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                self.salt += 1;
                param.map(|old| {
                    if !old.dtype().is_float() {
                        return old; // quantized
                    }
                    let dtype = self.dtype.unwrap_or(old.dtype());
                    if !old.is_require_grad() {
                        return old.cast(dtype).detach(); // on a device of the same gradient checkpointing
                    }
                    let dims = old.dims();
                    let scale = (dims.iter().product::<usize>() as f64 / dims[D - 1].max(1) as f64).sqrt();
                    let values = (0..dims.iter().product()).map(|i| number(i, self.salt) / scale).collect::<Vec<_>>();
                    let data = TensorData::new(values, dims).convert_dtype(dtype);
                    Tensor::from_data(data, (&old.device(), dtype)).require_grad()
                })
            }
        }
        model.map(&mut Fill { salt: 100 + 1000 * self.ddp.rank() as u64, dtype })
    }

    /// Wraps a filled model, with buckets so small that there are several. The oracle stays plain Burn.
    pub fn wrap<M: Module + 'static>(&self, model: M) -> Result<M> {
        if self.is_oracle() {
            self.started.borrow_mut().extend(values(&model));
            return Ok(model);
        }
        self.wrap_with(model, WrapConfig::new())
    }

    /// [`Run::wrap`] with settings of the case.
    pub fn wrap_with<M: Module + 'static>(&self, model: M, config: WrapConfig) -> Result<M> {
        // Threads reduce during backward, processes after it: both ways are tested.
        let overlap = self.ddp.engine() == "threads";
        let config = config.with_first_bucket_cap_bytes(200).with_bucket_cap_bytes(500).with_overlap(overlap);
        let model = self.wrap_bare(model, config)?;
        self.started.borrow_mut().extend(self.values(&model));
        Ok(model)
    }

    /// `ddp.wrap_with`, with sharding if the run has it, for [`sgd`] and [`adam`].
    pub fn wrap_bare<M: Module + 'static>(&self, model: M, config: WrapConfig) -> Result<M> {
        let model = self.wrap_for_others(model, config)?;
        self.checked(adam(), &model)?;
        Ok(model)
    }

    /// [`Run::wrap_bare`] for optimizers that the case checks itself, or that cannot be checked.
    pub fn wrap_for_others<M: Module + 'static>(&self, model: M, config: WrapConfig) -> Result<M> {
        let config = match self.sharded {
            true => config.with_sharding(Sharding::Parameters).with_sharding_above(1),
            false => config,
        };
        Ok(self.ddp.wrap_with(model, &config)?)
    }

    /// Returns `optim` once `ddp.optimizer` has checked that it can train `model`.
    pub fn checked<M: Module>(&self, optim: impl Into<DdpOptimizer>, model: &M) -> Result<DdpOptimizer> {
        Ok(self.ddp.optimizer(optim, model)?)
    }

    /// All values of a model, of sharded parameters the whole ones. Empty for a sharded model with LoRA, which `unwrap`
    /// refuses.
    pub fn values<M: Module>(&self, model: &M) -> Vec<Vec<f64>> {
        match self.sharded {
            true => self.ddp.unwrap(model.clone()).map(|whole| values(&whole)).unwrap_or_default(),
            false => values(model),
        }
    }

    /// `ddp.backward` for a model of [`Run::wrap`]: the oracle, whose model is not wrapped, has Burn's own gradients.
    pub fn grads<M: Module>(&self, loss: &Tensor<1>, model: &M) -> Result<Option<GradientsParams>> {
        Ok(match self.is_oracle() {
            true => Some(GradientsParams::from_grads(loss.backward(), model)),
            false => self.ddp.backward(loss, model)?,
        })
    }

    /// [`Run::grads`] of one loss for two models.
    pub fn grads_of_both<A: Module, B: Module>(
        &self,
        loss: &Tensor<1>,
        (a, b): (&A, &B),
    ) -> Result<Option<(GradientsParams, GradientsParams)>> {
        if !self.is_oracle() {
            return Ok(self.ddp.backward(loss, (a, b))?);
        }
        let mut grads = loss.backward();
        let of_a = GradientsParams::from_module(&mut grads, a);
        Ok(Some((of_a, GradientsParams::from_grads(grads, b))))
    }

    /// [`Run::grads`] and optimizer step, as a user writes them.
    pub fn step<M: Module>(&self, optim: &mut DdpOptimizer, model: M, loss: Tensor<1>) -> Result<M> {
        Ok(match self.grads(&loss, &model)? {
            Some(grads) => optim.step(0.1, model, grads),
            None => model,
        })
    }

    /// The outcome of a trained model.
    pub fn outcome<M: Module>(&self, model: &M) -> Result<Outcome> {
        let now = self.values(model);
        ensure!(now.iter().flatten().all(|v| v.is_finite()), "training diverged, so nothing can be compared");
        let moved = now.iter().any(|new| !new.is_empty() && !self.started.borrow().contains(new));
        ensure!(moved || now.is_empty(), "training changed nothing, so nothing is compared");
        let tolerance = if widest(&self.device) == DType::F64 { 1e-10 } else { 1e-4 };
        Ok(Outcome { hash: param_hash(model)?, values: now, tolerance })
    }

    /// Checks that `run` fails on this rank with a message that contains all `words`. For cases that cannot work.
    pub fn expect_error<T>(&self, run: impl FnOnce() -> Result<T>, words: &[&str]) -> Result<Outcome> {
        use std::panic::{AssertUnwindSafe, catch_unwind};
        let text = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(_)) => anyhow::bail!("this went through, but cannot work"),
            Ok(Err(error)) => format!("{error:#}"),
            Err(panic) => match panic.downcast::<String>() {
                Ok(text) => *text,
                Err(panic) => panic.downcast_ref::<&str>().copied().unwrap_or_default().to_owned(),
            },
        };
        ensure!(words.iter().all(|w| text.contains(w)), "the error does not say {words:?}: {text}");
        Ok(Outcome::nothing())
    }
}

/// SGD with momentum.
pub fn sgd() -> DdpOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init().into()
}

/// Adam.
pub fn adam() -> DdpOptimizer {
    AdamConfig::new().init().into()
}
