//! Hooks: each takes the gradient of one read of a parameter in backward, and gives the sum of a slot to the reducer.

use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Scalar;

use super::autodiff_nodes::HookState;
use super::model_state::State;
use super::scope::{self, Role, fail, has_failed, role_of};
use super::wrapped_model::WrappedModel;
use crate::Result;
use crate::gradients::{Contribution, GradientMemory};
use crate::tensor_conversion::burn_dtype;

/// Takes the gradient of the read with this `state`; `leaf` is the leaf of its parameter, if that is one.
///
/// # Panics
///
/// If no call of the door is open on this thread.
pub(super) fn hook<B: GradientMemory>(
    state: HookState<B>,
    leaf: Option<NodeId>,
    gradient: FloatTensor<B>,
    grads: &mut Gradients,
) {
    let model = state.read.model.clone();
    let counts_backwards = match role_of(&model) {
        Role::Trains { counts_backwards } => counts_backwards,
        Role::Ignored => return scope::note_ignored(&model),
        Role::NoCall => panic!(
            "`loss.backward()` reached a wrapped model: call `ddp.backward(&loss, &model)?`, or put the code that \
            calls it into `ddp.scope(&model, || ..)?`, on the thread that runs it. Gradients of this rank alone come \
            from `model.clone().no_grad()`, `model.valid()` or `ddp.unwrap(model.clone())?`"
        ),
    };
    if has_failed() {
        return;
    }
    let mut guard = model.lock();
    let taken = match guard.of::<B>() {
        Some(open) => model.take(open, state, leaf, gradient, counts_backwards.then_some(grads)),
        None => Err(model.fault("the model changed its backend: wrap it again".into())),
    };
    drop(guard);
    if let Err(error) = taken {
        fail(&model.ddp, error);
    }
}

impl WrappedModel {
    /// Adds the gradient of a read to those of earlier reads of its slot. The last one's sum goes to the reducer.
    fn take<B: GradientMemory>(
        self: &Arc<Self>,
        state: &mut State<B>,
        HookState { read, first, mixed, dtype, value }: HookState<B>,
        leaf: Option<NodeId>,
        gradient: FloatTensor<B>,
        counted: Option<&mut Gradients>,
    ) -> Result<()> {
        if !std::mem::replace(&mut state.reached, true) {
            state.reducer.begin_time();
        }
        if let Some(grads) = counted
            && scope::is_second_backward::<B>(grads, &state.device, gradient.dtype())
        {
            return Err(self.fault(
                "two backwards in one `ddp.scope` reached wrapped models: add the losses up, or give each its own scope"
                    .into(),
            ));
        }
        let number = read.slot;
        if first && value.is_some() {
            state.compared[number] = value;
        }
        let Some(leaf) = leaf else {
            return Err(self.fault(
                "a parameter of the wrapped model is not a leaf of the graph: move models with `fork`, not `to_device`"
                    .into(),
            ));
        };
        if gradient.dtype() != dtype {
            let (path, got) = (&self.slots[number].path, gradient.dtype());
            return Err(self.fault(format!(
                "the gradient of {path} is {got:?}, and the forward read it as {dtype:?}: a layer mixed two types. \
                Cast its input, or name it in `WrapConfig::with_full_precision`"
            )));
        }
        // Wide before anything is added to it.
        let gradient = match self.compute_dtype(number) {
            Some(_) => B::float_cast(gradient, burn_dtype(self.slots[number].dtype).into()),
            None => gradient,
        };
        let slot = &mut state.slots[number];
        if first && slot.leaf.is_some_and(|known| known != leaf) || slot.done {
            let path = &self.slots[number].path;
            return Err(self.fault(format!(
                "two copies of the wrapped model met in one backward, or {path} was read while backward ran: wrap the \
                copy itself (a target network, an EMA) or detach it"
            )));
        }
        if self.is_divided(number) {
            self.refuse_mixed_elements(number, leaf, mixed)?;
        }
        if first {
            slot.leaf = Some(leaf);
        }
        let sum = match slot.partial.take() {
            Some(earlier) => B::float_add(gradient, earlier),
            None => gradient,
        };
        let micro_batch = state.reducer.micro_batch();
        let is_last = match self.shards().filter(|_| self.is_sharded(number) && micro_batch.reducing) {
            None => read.is_last(),
            Some(shards) => {
                state.sharded.agree(shards, &self.outstanding(), &micro_batch)?;
                state.sharded.is_last_hook(number)
            }
        };
        if !is_last {
            state.slots[number].partial = Some(sum);
            return Ok(());
        }
        self.put(state, number, sum)
    }

    /// Gives the final gradient of a slot to the reducer, or reduces it to this rank's part.
    pub(super) fn put<B: GradientMemory>(
        &self,
        state: &mut State<B>,
        slot: usize,
        gradient: FloatTensor<B>,
    ) -> Result<()> {
        state.slots[slot].done = true;
        let gradient = match state.loss_scale {
            // A power of two, so no bit changes unless the gradient is subnormal.
            Some(scale) if scale != 1.0 => B::float_mul_scalar(gradient, Scalar::Float(1.0 / scale)),
            _ => gradient,
        };
        let micro_batch = state.reducer.micro_batch();
        if self.compares() && micro_batch.contribution != Contribution::Ignored {
            let read = state.same_gradients.add::<B>(slot, &gradient);
            read.map_err(|e| self.fault(format!("reading the gradient of {}: {e}", self.slots[slot].path)))?;
        }
        match self.shards().filter(|_| self.is_sharded(slot)) {
            None => state.reducer.put(slot, gradient),
            Some(shards) => state.sharded.put(shards, slot, gradient, micro_batch),
        }
    }
}
