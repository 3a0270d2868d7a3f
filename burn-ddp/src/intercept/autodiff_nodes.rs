//! The backend extension: two autodiff nodes per read of a parameter, a gate and a hook. `README.md` has the protocol.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};

use super::hook_depth::untracked;
use super::model_state::ModelOpening;
use super::parameter_read::Read;
use super::shard::{Regather, evaluated, gathered};
use super::wrapped_model::{TapHandle, WrappedModel};
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

    /// Returns `x`, a parameter's value. With autodiff, its gradient goes to the reducer of `tap` instead of to `x`.
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

    /// Returns the leaf under which averages of a parameter that this rank did not use wait for an optimizer, or `x` if
    /// there is none.
    fn stand_in(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let _ = tap;
        x
    }
}

extend_backends!(DdpBackend {
    fn gather_part(part: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        evaluated::<Self>(part, &tap)
    }
});

/// State of a hook: the read that it belongs to, the parameter's leaf, whether clones of it may be on other leaves,
/// and, if it is to be compared, its value.
#[derive(Clone, Debug)]
struct HookState<B: Backend> {
    read: Read,
    leaf: NodeId,
    apart: bool,
    /// See [`TapHandle::mixed`].
    mixed: bool,
    value: Option<FloatTensor<B>>,
}

#[derive(Debug)]
struct Hook;

impl<B: GradientMemory> Backward<B, 2> for Hook {
    type State = HookState<B>;

    fn backward(self, ops: Ops<HookState<B>, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        // The layers that used the read have run and are gone: another owner of the node is the tensor that the read
        // returned.
        let is_kept = Arc::strong_count(&ops.node) > 1;
        let HookState { read, leaf, apart, mixed, value } = ops.state;
        read.model.lookups.trained(read.slot, leaf);
        if is_kept {
            read.model.lookups.kept(read.slot, leaf);
        }
        read.model.clone().hook::<B>(read, (leaf, apart, mixed), value, gradient, grads);
    }
}

#[derive(Debug)]
struct Gate;

impl<B: GradientMemory> Backward<B, 1> for Gate {
    type State = Arc<WrappedModel>;

    fn backward(self, ops: Ops<Arc<WrappedModel>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let parent_is_leaf = ops.parents[0].as_ref().is_none_or(|p| p.order == 0);
        ops.state.gate::<B>(parent_is_leaf, grads);
    }
}

impl<B: DdpBackend + GradientMemory, C: CheckpointStrategy> DdpBackend for Autodiff<B, C> {
    fn open_model(x: FloatTensor<Self>, opening: ModelOpening) -> FloatTensor<Self> {
        opening.open::<B>(x.device(), x.dtype());
        x
    }

    fn grad_tap(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        let TapHandle { model, slot, apart, value_id, mixed } = tap;
        if !x.is_tracked() {
            if model.is_sharded(slot) {
                let (part, trainable) = (x.primitive().clone(), model.is_trainable(slot));
                let tap = TapHandle { model, slot, apart, value_id, mixed };
                // A frozen layer over trained ones keeps the whole until its backward, as Burn recomputes only tracked
                // nodes.
                let whole = if trainable { evaluated::<B>(part, &tap) } else { gathered::<B>(&tap, part).0 };
                return untracked::<B>(whole);
            }
            // A parameter that was trainable at `wrap` is frozen in a lagging copy: a target network.
            if model.compares() && !model.is_trainable(slot) {
                model.note_value::<B>(slot, &x);
            }
            return x;
        }
        let leaf = x.id();
        let value = (model.compares() && !model.is_sharded(slot)).then(|| x.primitive().clone());
        let before = model.lookups.before_read();
        let rung = model.rung::<B, C>(slot, &x);
        let (primitive, guard) = x.into_parts();
        let gate = match Backward::<B, 1>::prepare::<C>(Gate, [guard]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(model.clone(), primitive),
            OpsKind::UnTracked(prep) => return prep.finish(primitive),
        };
        let read = || HookState { read: Read::new(model.clone(), slot), leaf, apart, mixed, value };
        let read = match model.is_sharded(slot) {
            true => {
                let tap = TapHandle { model: model.clone(), slot, apart, value_id, mixed };
                let (whole, number) = gathered::<B>(&tap, gate.primitive().clone());
                let again = Regather::<B> { tap, read: number, part: gate.id(), backend: PhantomData };
                // This strategy, whatever that of the device is, so that nothing keeps the whole until backward.
                let prep = Backward::<B, 2>::prepare::<BalancedCheckpointing>(Hook, [gate.node(), rung]);
                match prep.memory_bound().retro_forward(again).parents([&gate]).stateful() {
                    OpsKind::Tracked(prep) => prep.finish(read(), whole),
                    OpsKind::UnTracked(prep) => return prep.finish(whole),
                }
            }
            false => {
                let (primitive, gate) = gate.into_parts();
                match Backward::<B, 2>::prepare::<C>(Hook, [gate, rung]).compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish(read(), primitive),
                    OpsKind::UnTracked(prep) => return prep.finish(primitive),
                }
            }
        };
        model.lookups.read(slot, leaf, before, read.id());
        read
    }

    fn gather_part(part: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        untracked::<B>(evaluated::<B>(part.primitive().clone(), &tap))
    }

    fn note_value(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        tap.model.note_value::<B>(tap.slot, &x);
        x
    }

    fn stand_in(x: FloatTensor<Self>, tap: TapHandle) -> FloatTensor<Self> {
        tap.model.stand_in::<B>(tap.stand_in_key()).unwrap_or(x)
    }
}
