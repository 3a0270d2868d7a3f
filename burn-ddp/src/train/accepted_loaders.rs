//! Loaders that `ddp.training` takes.

use crate::data::{EvalLoader, ShardedLoader};

/// A loader of burn-ddp: `L` itself.
///
/// [`DdpTrainer::training`](super::DdpTrainer::training) takes a [`ShardedLoader`] to train on and an [`EvalLoader`] to
/// validate on. Each rank reads its share of them. Burn's own loader does not compile:
///
/// ```compile_fail,E0277
/// # use burn::{data::dataloader::DataLoader, train::{InferenceStep, LearnerModel, TrainStep}};
/// # use burn_ddp::{data::EvalLoader, prelude::*};
/// # use std::sync::Arc;
/// # type Train<M> = Arc<dyn DataLoader<<M as TrainStep>::Input>>; // `ShardedLoader<…>` compiles
/// # type Valid<M> = EvalLoader<<M as InferenceStep>::Input>;
/// fn train<M: LearnerModel>(ddp: &Ddp, train: Train<M>, valid: Valid<M>) {
///     ddp.training::<M>("artifacts", train, valid);
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`ddp.training` takes a `{L}` here, and this is a `{Self}`",
    label = "not a loader of this rank's share",
    note = "make the training loader by `ddp.loader(batcher)…build(dataset)?` and the one for validation by \
            `ddp.eval_loader(batcher)…build(dataset)?`; of a loader of Burn's every rank would read everything"
)]
pub trait RankLoader<L>: Into<L> {}

impl<O> RankLoader<ShardedLoader<O>> for ShardedLoader<O> {}
impl<O> RankLoader<EvalLoader<O>> for EvalLoader<O> {}
