//! Data-parallel training for the [Burn](https://burn.dev) deep-learning framework.
//!
//! Each of several processes (*ranks*) holds the same model, sees its own share of the data, and computes gradients;
//! `ddp.backward(&loss, &model)` averages the gradients of all ranks, and Burn's own optimizers apply the averages.
//! It is for Burn what DDP with torchrun is for PyTorch, and `MirroredStrategy` for TensorFlow.
//!
//! # Example
//!
//! A training loop. In a program that begins with [`Ddp::init`], `cargo run` runs it on one rank, and
//! `burnrun --nproc-per-node 8` on eight. Here two threads are the ranks:
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
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
//!         let Some(grads) = ddp.backward(&loss, &model)? else { continue }; // averages over all ranks
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
//! | [`Ddp`] | one rank: `init`, `launch`, `spawn`; `wrap`, `backward`; `mean`, `save` |
//! | [`WrapConfig`], [`GradientReduction`], [`BufferPolicy`] | accumulation, mean or sum, buckets, running statistics |
//! | [`nn`] | `SyncBatchNorm`: statistics over the batches of all ranks |
//! | [`clip_grad_norm`], [`clip_grad_value`], [`grad_norm`] | clipping of averaged gradients |
//! | [`DdpConfig`] | all settings in one file |
//! | [`Ddp::stop_requested`] | a signal stops all ranks after the same step, to save and to be started again |
//! | [`checkpoint`] | model, optimizers, schedules and values, saved as one unit that is complete or absent |
//! | [`data`] | each rank's share: `DistributedSampler`, `ShardedDataset`, the loader |
//! | [`Collectives`] | `all_reduce`, `broadcast`, … on tensors; `broadcast_parameters` |
//! | [`Differentiable`] | collectives through which gradients flow |
//! | `train` | with the feature `train`: Burn's `SupervisedTraining` on all ranks |
//! | [`Telemetry`], [`Stats`], [`Straggler`] | the time of a step, by what it is spent on |
//! | [`TensorBoard`] | curves for TensorBoard, from [`Telemetry::tensorboard`] |
//! | [`Report`], [`Bottleneck`], [`Cause`] | why a run is slow, from [`Telemetry::report`] |
//! | [`MemoryUse`] | memory of a rank, before and in training |
//! | [`DistributedOptimizer`] | as in Horovod, the optimizer averages gradients, for models that are not wrapped |
//! | [`comm`] | the layer below: worlds, process groups, collectives on slices; does not depend on Burn |
//! | [`Error`] | what can go wrong |
//!
//! The repository's `docs/` has a quickstart, error messages, models and numerics, and the architecture.
#![deny(unsafe_code)]
// Burn deprecates these backends; they are still supported.
#![cfg_attr(any(feature = "ndarray", feature = "tch"), allow(deprecated))]

mod agreement;
mod backends;
mod backward;
mod batch_weight;
pub mod checkpoint;
mod chunked_broadcast;
mod collectives;
pub mod config;
pub mod data;
mod ddp;
mod device;
mod differentiable;
mod element_collectives;
mod engine_choice;
mod error;
mod exact_sums;
mod file_failure;
mod gradients;
mod intercept;
mod job_leaves;
mod join;
mod logical_ranks;
mod loss_scaling;
mod main_first;
mod master;
mod model;
#[cfg(feature = "nccl")]
mod nccl;
pub mod nn;
mod optimizer;
mod precision;
mod scalar_reductions;
mod seed;
mod stop;
mod telemetry;
mod tensor_conversion;
#[cfg(feature = "train")]
pub mod train;
mod wrap;

pub use backward::{Weighted, scale_loss};
/// Communication between ranks: the crate `burn-ddp-comm`.
pub use burn_ddp_comm as comm;
pub use burn_ddp_comm::{ReduceOp, WorldOptions};
pub use collectives::Collectives;
pub use config::{BatchSizes, DdpConfig};
pub use ddp::Ddp;
pub use differentiable::Differentiable;
pub use error::{Error, Result};
pub use exact_sums::ExactSums;
pub use gradients::GradientReduction;
pub use intercept::Trained;
pub use loss_scaling::LossScaling;
pub use master::master;
pub use model::param_hash::param_hash;
pub use model::running_stats::BufferPolicy;
pub use optimizer::clip::{clip_grad_norm, clip_grad_value, grad_norm};
pub use optimizer::ddp_optimizer::DdpOptimizer;
pub use optimizer::distributed::DistributedOptimizer;
pub use precision::Precision;
pub use scalar_reductions::{FloatScalar, Scalar};
pub use telemetry::{Bottleneck, Cause, MemoryUse, Report, Stats, Straggler, Telemetry, TensorBoard};
pub use wrap::{Sharding, WrapConfig};

/// Traits that burn-ddp implements for Burn's backends, and their types. Programs do not use them directly.
#[doc(hidden)]
pub mod backend {
    pub use crate::differentiable::{Adjoint, CollectiveBackend};
    pub use crate::gradients::{DeviceLoan, GradientMemory, HostCopy};
    pub use crate::intercept::{DdpBackend, ModelOpening, Models, Own, Prepared, TapHandle};
    pub use crate::nn::sync_batch_norm_node::{SyncBatchNormBackend, SyncedBatch};
}

/// The imports of a training program.
pub mod prelude {
    #[cfg(feature = "train")]
    pub use crate::train::DdpTrainer;
    pub use crate::{
        BufferPolicy, Collectives, Ddp, DdpConfig, DdpOptimizer, GradientReduction, ReduceOp, Sharding, WrapConfig,
        param_hash,
    };
}
