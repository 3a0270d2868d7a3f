//! The backend extension: two autodiff nodes per read of a parameter, and what they do in backward.
//!
//! `intercept/README.md` tells the protocol.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{AutodiffBackend, Backend, backend_extension};

use super::wrapped_model::{Read, WrappedModel};
use crate::backends::extend_backends;
use crate::gradients::GradientMemory;

/// A tensor of the autodiff backend over `B`, whatever its checkpointing strategy.
pub(crate) type AutodiffTensor<B> = FloatTensor<Autodiff<B>>;

/// Names one tapped parameter of one wrapped model. Opaque: made by `wrap`, passed through [`DdpBackend`].
#[derive(Clone, Debug)]
pub struct TapHandle {
    pub(crate) model: Arc<WrappedModel>,
    pub(crate) slot: usize,
}

/// What burn-ddp adds to a Burn backend: an identity on parameters whose autodiff implementation intercepts gradients.
///
/// Implemented for every execution backend that burn-ddp supports and for `Autodiff` over them. Users do not call it:
/// [`Ddp::wrap`](crate::Ddp::wrap) does.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    LibTorch: cfg(feature = "tch"),
    Cube: cfg(feature = "cube"),
    Autodiff
)]
pub trait DdpBackend: Backend {
    /// Returns `x`. With autodiff, its gradient goes to the reducer of `tap` instead of to `x`.
    fn grad_tap(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let _ = tap;
        x
    }

    /// Returns `x`, a parameter's value, and remembers it until the next backward.
    fn note_leaf(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let _ = tap;
        x
    }

    /// Returns the leaf under which the last backward delivered the average of a parameter that this rank did not use, or
    /// `x` if there is none.
    fn delivered(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let _ = tap;
        x
    }
}

extend_backends!(DdpBackend);

/// State of a hook: where its gradient belongs. The read is counted as outstanding until this is dropped.
#[derive(Clone, Debug)]
pub(crate) struct HookState {
    pub(crate) read: Arc<Read>,
    pub(crate) leaf: NodeId,
}

#[derive(Debug)]
struct Hook;

impl<B: DdpBackend + GradientMemory> Backward<B, 2> for Hook {
    type State = HookState;

    fn backward(self, ops: Ops<HookState, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let HookState { read, leaf } = ops.state;
        read.tapped.clone().hook::<B>(read, leaf, gradient, grads);
    }
}

#[derive(Debug)]
struct Gate;

impl<B: DdpBackend + GradientMemory> Backward<B, 1> for Gate {
    type State = Arc<WrappedModel>;

    fn backward(self, ops: Ops<Arc<WrappedModel>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let parent_is_leaf = ops.parents[0].as_ref().is_none_or(|p| p.order == 0);
        ops.state.gate::<B>(parent_is_leaf, grads);
    }
}

/// A step of the ladder: raises the depth of the hooks that hang on it, does nothing in backward.
#[derive(Debug)]
struct Rung;

impl<B: Backend> Backward<B, 1> for Rung {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

/// The tensor one rung above `below`.
pub(crate) fn rung_above<B: Backend, C: CheckpointStrategy>(below: AutodiffTensor<B>) -> AutodiffTensor<B> {
    let (primitive, guard) = below.into_parts();
    match Backward::<B, 1>::prepare::<C>(Rung, [guard]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((), primitive),
        OpsKind::UnTracked(prep) => prep.finish(primitive),
    }
}

impl<B: DdpBackend + GradientMemory, C: CheckpointStrategy> DdpBackend for Autodiff<B, C> {
    fn grad_tap(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        if !x.is_tracked() {
            tap.model.note_frozen::<B>(tap.slot, &x);
            return x;
        }
        let leaf = x.id();
        let rung = tap.model.rung::<B, C>(tap.slot, &x);
        let (primitive, guard) = x.into_parts();
        let gate = match Backward::<B, 1>::prepare::<C>(Gate, [guard]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(tap.model.clone(), primitive),
            OpsKind::UnTracked(prep) => return prep.finish(primitive),
        };
        let (primitive, gate) = gate.into_parts();
        let (_, rung) = rung.into_parts();
        match Backward::<B, 2>::prepare::<C>(Hook, [gate, rung]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let read = Read::new(tap.model, tap.slot);
                prep.finish(HookState { read: Arc::new(read), leaf }, primitive)
            }
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn note_leaf(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        tap.model.keep_on::<B>(&x);
        tap.model.note_leaf::<B>(tap.slot, &x);
        x
    }

    fn delivered(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        tap.model.waiting.stand_in::<B>(tap.slot).unwrap_or(x)
    }
}

/// A leaf that requires a gradient, as `require_grad` makes it.
pub(crate) fn new_leaf<B: Backend>(value: FloatTensor<B>) -> AutodiffTensor<B> {
    untracked::<B>(value).require_grad()
}

/// A tensor of the autodiff backend outside any graph.
pub(crate) fn untracked<B: Backend>(value: FloatTensor<B>) -> AutodiffTensor<B> {
    <Autodiff<B> as AutodiffBackend>::from_inner(value)
}
