//! One rank's run of a case: its data, its model's values, its outcome.

use std::cell::RefCell;
use std::ops::Range;

use anyhow::{Result, ensure};
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, Gradients, TensorData};
use burn_ddp::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{number, rows, values, widest};

/// Parts of a global batch, which the ranks share out: divides by every world size that is tried.
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
    /// For cases that are about what one rank sees, and have asserted it.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// For narrow dtypes, and for what amplifies rounding.
    #[must_use]
    pub fn within(mut self, tolerance: f64) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Both models.
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

    /// The run with all parameters sharded that can be.
    #[must_use]
    pub fn sharded(self) -> Self {
        Run { sharded: true, ..self }
    }

    /// The run with the whole batch on every rank.
    #[must_use]
    pub fn on_all_data(self) -> Self {
        Run { on_all_data: true, ..self }
    }

    /// The same rank with other numbers.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> Self {
        let (ddp, device) = (self.ddp.clone(), self.device.clone());
        let (sharded, on_all_data) = (self.sharded, self.on_all_data);
        Run { ddp, device, dtype, sharded, on_all_data, started: RefCell::default() }
    }

    /// Whether this is the run that the others are compared with.
    pub fn is_oracle(&self) -> bool {
        self.ddp.world_size() == 1
    }

    /// Parts of the batch that are this rank's.
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

    /// From a sum over items of this rank to a loss whose mean over ranks is the sum over all items / 8, in exact
    /// arithmetic.
    pub fn scale(&self, sum: Tensor<1>) -> Tensor<1> {
        let shares = if self.on_all_data { 1 } else { self.ddp.world_size() };
        sum * (shares as f64 / 8.0)
    }

    /// The same for a loss of several terms, one for each part of the batch.
    pub fn over_parts(&self, loss: impl FnMut(usize) -> Tensor<1>) -> Tensor<1> {
        let sum = self.parts().map(loss).reduce(|a, b| a + b);
        self.scale(sum.expect("every rank has a part"))
    }

    /// Gives every trainable parameter values that depend on its place alone, in this run's dtype, frozen ones the
    /// dtype. On ranks other than 0 they are wrong: `wrap` has to replace them.
    pub fn fill<M: Module>(&self, model: M) -> M {
        self.fill_as(model, Some(self.dtype))
    }

    /// [`Run::fill`], with every parameter's own dtype if there is none given.
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
        // Both ways to reduce: beside backward and after it.
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

    /// `optim`, if it can train `model`.
    pub fn checked<M: Module>(&self, optim: ModuleOptimizer, model: &M) -> Result<ModuleOptimizer> {
        Ok(self.ddp.optimizer(optim, model)?)
    }

    /// All values of a model, the whole of sharded parameters; none of a sharded model that has LoRA, which `unwrap`
    /// does not take.
    pub fn values<M: Module>(&self, model: &M) -> Vec<Vec<f64>> {
        match self.sharded {
            true => self.ddp.unwrap(model.clone()).map(|whole| values(&whole)).unwrap_or_default(),
            false => values(model),
        }
    }

    /// `ddp.backward`; on the oracle, Burn's.
    pub fn checked_backward<M: Module>(&self, loss: &Tensor<1>, model: &M) -> Result<Gradients> {
        Ok(if self.is_oracle() { loss.backward() } else { self.ddp.backward(loss, model)? })
    }

    /// One step as a user writes it.
    pub fn step<M: Module>(&self, optim: &mut ModuleOptimizer, model: M, loss: Tensor<1>) -> M {
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        optim.step(0.1, model, grads)
    }

    /// What is left of a model that was trained.
    pub fn outcome<M: Module>(&self, model: &M) -> Result<Outcome> {
        let now = self.values(model);
        ensure!(now.iter().flatten().all(|v| v.is_finite()), "training diverged, so nothing can be compared");
        let moved = now.iter().any(|new| !new.is_empty() && !self.started.borrow().contains(new));
        ensure!(moved || now.is_empty(), "training changed nothing, so nothing is compared");
        let tolerance = if widest(&self.device) == DType::F64 { 1e-10 } else { 1e-4 };
        Ok(Outcome { hash: param_hash(model)?, values: now, tolerance })
    }

    /// Whether `run` fails on this rank, with a message that has all `words`. For cases that cannot work.
    pub fn expect_error<T>(&self, run: impl FnOnce() -> Result<T>, words: &[&str]) -> Result<Outcome> {
        use std::panic::{AssertUnwindSafe, catch_unwind};
        let text = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(_)) => anyhow::bail!("this went through, but cannot work"),
            Ok(Err(error)) => format!("{error:#}"),
            Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
        };
        ensure!(words.iter().all(|w| text.contains(w)), "the error does not say {words:?}: {text}");
        Ok(Outcome::nothing())
    }
}

/// SGD with momentum.
pub fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

/// Adam.
pub fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}
