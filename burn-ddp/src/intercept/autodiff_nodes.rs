//! The backend extension: one autodiff node per read of a parameter, the hook. `README.md` has the protocol.

use std::marker::PhantomData;

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::DType;

use super::hook::hook;
use super::hook_depth::untracked;
use super::model_state::ModelOpening;
use super::parameter_read::Read;
use super::shard::{Regather, evaluated, gathered};
use super::tap_handle::TapHandle;
use crate::backends::extend_backends;
use crate::gradients::GradientMemory;

/// burn-ddp's addition to a Burn backend: an identity on parameters whose autodiff implementation intercepts gradients.
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
    /// Makes the state of a wrapped model for the backend of `x`, a tensor on the model's device. Returns `x`.
    fn open_model(x: FloatTensor<Self>, opening: ModelOpening) -> FloatTensor<Self> {
        let _ = opening;
        x
    }

    /// Returns `x`, a parameter's value, in the type in which the model computes. With autodiff, its gradient goes to
    /// the reducer of `tap` instead of to `x`.
    fn grad_tap(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let _ = tap;
        x
    }

    /// Returns the whole of a sharded parameter, of which `part` is this rank's, for a forward without backward.
    fn gather_part(part: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self>;

    /// Notes `x`, a parameter's value, until the next backward ends. Returns `x`.
    fn note_value(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let _ = tap;
        x
    }

    /// Returns the average of the parameter that the last backward has left, once, or `x` if there is none.
    fn average(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let _ = tap;
        x
    }
}

extend_backends!(DdpBackend {
    fn gather_part(part: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        evaluated::<Self>(part, &tap)
    }
});

/// State of a hook: the read that it belongs to and, if it is to be compared, the value that was read.
#[derive(Clone, Debug)]
pub(super) struct HookState<B: Backend> {
    pub(super) read: Read,
    /// See [`TapHandle::first`].
    pub(super) first: bool,
    /// See [`TapHandle::mixed`].
    pub(super) mixed: bool,
    /// Type of the value that was read, and so of its gradient.
    pub(super) dtype: DType,
    pub(super) value: Option<FloatTensor<B>>,
}

#[derive(Debug)]
struct Hook;

impl<B: GradientMemory> Backward<B, 2> for Hook {
    type State = HookState<B>;

    fn backward(self, ops: Ops<HookState<B>, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        // None flows on to the leaf.
        let gradient = grads.consume::<B>(&ops.node);
        let leaf = ops.parents[0].as_ref().filter(|parent| parent.order == 0).map(|leaf| leaf.id);
        hook(ops.state, leaf, gradient, grads);
    }
}

impl<B: DdpBackend + GradientMemory, C: CheckpointStrategy> DdpBackend for Autodiff<B, C> {
    fn open_model(x: FloatTensor<Self>, opening: ModelOpening) -> FloatTensor<Self> {
        opening.open::<B>(x.device());
        x
    }

    fn grad_tap(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let (model, slot) = (&tap.model, tap.slot);
        let sharded = model.is_sharded(slot);
        if !x.is_tracked() {
            if sharded {
                let part = x.primitive().clone();
                // A frozen layer over trained ones keeps the whole until its backward, as Burn recomputes only tracked
                // nodes.
                let whole =
                    if model.is_trainable(slot) { evaluated::<B>(part, &tap) } else { gathered::<B>(&tap, part).0 };
                return untracked::<B>(whole);
            }
            // A parameter that was trainable at `wrap` is frozen in a lagging copy: a target network.
            if model.compares() && !model.is_trainable(slot) {
                model.note_value::<B>(&tap, &x);
            }
            return match model.compute_dtype(slot) {
                None => x,
                Some(dtype) => untracked::<B>(model.read_as::<B>(slot, &x, dtype)),
            };
        }
        let value = (model.compares() && !sharded).then(|| x.primitive().clone());
        let rung = model.rung::<B, C>(slot, &x);
        let state = HookState {
            read: Read::new(model.clone(), slot),
            first: tap.first,
            mixed: tap.mixed,
            dtype: model.compute_dtype(slot).map_or(x.dtype(), DType::from),
            value,
        };
        if sharded {
            let (whole, number) = gathered::<B>(&tap, x.primitive().clone());
            let again = Regather::<B> { tap, read: number, part: x.id(), backend: PhantomData };
            // This strategy, whatever that of the device is, so that nothing keeps the whole until backward.
            let prep = Backward::<B, 2>::prepare::<BalancedCheckpointing>(Hook, [x.node(), rung]);
            return match prep.memory_bound().retro_forward(again).parents([&x]).stateful() {
                OpsKind::Tracked(prep) => prep.finish(state, whole),
                OpsKind::UnTracked(prep) => prep.finish(whole),
            };
        }
        // In the hook's own node, so a cast costs none of its own.
        let narrow = model.compute_dtype(slot).map(|dtype| model.read_as::<B>(slot, &x, dtype));
        let (master, leaf) = x.into_parts();
        let primitive = narrow.unwrap_or(master);
        match Backward::<B, 2>::prepare::<C>(Hook, [leaf, rung]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(state, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }

    fn gather_part(part: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        untracked::<B>(evaluated::<B>(part.primitive().clone(), &tap))
    }

    fn note_value(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        tap.model.note_value::<B>(&tap, &x);
        x
    }

    fn average(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        match tap.model.take_average::<B>(tap.slot) {
            Some(average) => untracked::<B>(average),
            None => x,
        }
    }
}
