//! Data-parallel training for the [Burn](https://burn.dev) deep-learning framework.
//!
//! Each of several processes (*ranks*) holds the same model, sees its own share of the data, and computes gradients; burn-ddp
//! averages them inside `loss.backward()` and Burn's own optimizers go on from there. What torch DDP and torchrun, Horovod and
//! `MirroredStrategy` are to Python.
//!
//! # Example
//!
//! The loop people write; `cargo run` runs it alone, `burnrun --nproc-per-node 8` on eight ranks. Here two ranks are threads:
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{GradientsParams, Optimizer, SgdConfig};
//! use burn::prelude::*;
//! use burn_ddp::prelude::*;
//!
//! let losses = Ddp::spawn(2, |ddp| {
//!     let device = ddp.device()?.autodiff();
//!     let mut model: Linear = ddp.wrap(LinearConfig::new(2, 1).init(&device))?; // rank 0's weights everywhere
//!     let mut optim = SgdConfig::new().init();
//!     let mut last = 0.0;
//!     for step in 0..20 {
//!         let x = Tensor::<2>::from_floats([[1.0, (ddp.rank() + step) as f32 % 3.0]], &device); // this rank's data
//!         let y = x.clone().sum_dim(1);
//!         let loss = (model.forward(x) - y).powf_scalar(2.0).mean();
//!         last = ddp.mean(loss.clone().into_scalar::<f32>())?; // the same number on both ranks
//!         let grads = loss.backward(); // averaged over all ranks when it returns
//!         let grads = GradientsParams::from_grads(grads, &model);
//!         model = optim.step(0.05, model, grads);
//!     }
//!     Ok((last, param_hash(&model)?))
//! })?;
//! assert_eq!(losses[0], losses[1]); // same loss, same weights, bit for bit
//! # Ok::<(), burn_ddp::Error>(())
//! ```
//!
//! # Map
//!
//! | | |
//! |---|---|
//! | [`Ddp`] | one rank: `init`, `launch`, `spawn`; `wrap`; `mean`, `save`, collectives on tensors |
//! | [`WrapConfig`], [`Reduction`], [`BufferPolicy`] | accumulation, mean or sum, bucket sizes, running statistics |
//! | [`nn`] | `SyncBatchNorm`: the batch of all ranks |
//! | [`clip_grad_norm`], [`clip_grad_value`], [`grad_norm`] | on averaged gradients |
//! | [`DdpConfig`] | all settings in one file |
//! | [`checkpoint`] | one unit to go on from: model, optimizers, schedules, values; complete or not there |
//! | [`data`] | this rank's share: `DistributedSampler`, `ShardedDataset`, the loader |
//! | [`Differentiable`] | collectives that gradients go through |
//! | `train` | with the feature `train`: Burn's `SupervisedTraining` on all ranks |
//! | [`DdpBackend`], [`GradientMemory`] | the backend extension that intercepts gradients, and what a backend's memory can do; used by `wrap` |
//! | [`Stats`], [`Straggler`] | where the time of steps goes |
//! | [`comm`] | below: worlds, process groups, collectives on slices; knows nothing of Burn |
//! | [`Error`] | what can go wrong |
//!
//! The repository's `docs/` has concepts, architecture, numerics and errors.
#![deny(unsafe_code)]
// Burn deprecates these backends; those who still use them are served.
#![cfg_attr(any(feature = "ndarray", feature = "tch"), allow(deprecated))]

mod agree;
mod backends;
mod buffers;
mod burnpack;
pub mod checkpoint;
mod clip;
mod collective;
pub mod config;
mod convert;
pub mod data;
mod ddp;
mod device;
mod differentiable;
mod distributed_optimizer;
mod error;
mod gradients;
mod horovod;
mod intercept;
mod join;
mod meter;
pub mod nn;
mod optimizer_state;
mod placement;
mod replicas;
mod save;
mod schema;
mod seed;
mod spawn;
mod stats;
mod straggler;
#[cfg(feature = "train")]
pub mod train;
mod weight;
mod wrap;

pub use buffers::BufferPolicy;
/// Ranks talking: the crate `burn-ddp-comm`.
pub use burn_ddp_comm as comm;
pub use burn_ddp_comm::{Options, ReduceOp};
pub use clip::{clip_grad_norm, clip_grad_value, grad_norm};
pub use config::{BatchSizes, DdpConfig};
pub use ddp::Ddp;
pub use differentiable::{Adjoint, CollectiveBackend, Differentiable};
pub use distributed_optimizer::DistributedOptimizer;
pub use error::{Error, Result};
pub use gradients::{DeviceLoan, GradientMemory, HostCopy, Reduction};
pub use intercept::{DdpBackend, ModelOpening, TapHandle};
pub use save::param_hash;
pub use stats::Stats;
pub use straggler::Straggler;
pub use wrap::WrapConfig;

/// What a training program imports.
pub mod prelude {
    #[cfg(feature = "train")]
    pub use crate::train::DdpTrainer;
    pub use crate::{BufferPolicy, Ddp, DdpConfig, DistributedOptimizer, ReduceOp, Reduction, WrapConfig, param_hash};
}
