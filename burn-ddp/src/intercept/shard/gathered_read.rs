//! Value of a read: the parts of all ranks, gathered in forward and, where a layer needs it, again in backward.

use std::marker::PhantomData;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape, TensorData};

use super::device_call::on_device;
use super::shard_group::{Purpose, ShardGroup, filled};
use crate::Result;
use crate::gradients::{DeviceLoan, GradientMemory, shared_bytes};
use crate::intercept::scope::{fail, fail_forward};
use crate::intercept::tap_handle::TapHandle;
use crate::tensor_conversion::burn_dtype;

/// The whole of a slot for a forward without backward.
pub(in crate::intercept) fn evaluated<B: GradientMemory>(part: FloatTensor<B>, tap: &TapHandle) -> FloatTensor<B> {
    gathered_for::<B>(tap, part, Purpose::Evaluation)
}

/// The whole of a slot for a forward, and the number of the read. *Collective*.
pub(in crate::intercept) fn gathered<B: GradientMemory>(
    tap: &TapHandle,
    part: FloatTensor<B>,
) -> (FloatTensor<B>, usize) {
    let read = tap.model.shards().map_or(0, |shards| shards.next_read(tap.slot));
    (gathered_for::<B>(tap, part, Purpose::Forward(read)), read)
}

/// Gathers a slot again, for the backward of a layer that needs its value.
#[derive(Debug)]
pub(in crate::intercept) struct Regather<B: Backend> {
    pub(in crate::intercept) tap: TapHandle,
    pub(in crate::intercept) read: usize,
    /// Node of the part.
    pub(in crate::intercept) part: NodeId,
    pub(in crate::intercept) backend: PhantomData<fn() -> B>,
}

impl<B: GradientMemory> RetroForward for Regather<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let part = states.get_state::<FloatTensor<B>>(&self.part);
        states.save(out, gathered_for::<B>(&self.tap, part, Purpose::Backward(self.read)));
    }
}

/// The whole of a slot. If it cannot be gathered this panics, or, in `Ddp::backward`, notes the error and returns
/// zeros.
fn gathered_for<B: GradientMemory>(tap: &TapHandle, part: FloatTensor<B>, purpose: Purpose) -> FloatTensor<B> {
    let (device, dims) = (part.device(), Shape::from(tap.model.slots[tap.slot].dims.clone()));
    let dtype = tap.read_dtype().map_or(part.dtype(), DType::from);
    match gather::<B>(tap, part, purpose) {
        Ok(whole) => whole,
        Err(error) => {
            match purpose {
                Purpose::Forward(_) | Purpose::Evaluation => fail_forward(&tap.model.ddp, error),
                _ => fail(&tap.model.ddp, error),
            }
            B::float_zeros(dims, &device, dtype.into())
        }
    }
}

fn gather<B: GradientMemory>(tap: &TapHandle, part: FloatTensor<B>, purpose: Purpose) -> Result<FloatTensor<B>> {
    let TapHandle { model, slot, value_id, .. } = tap;
    let (device, s) = (part.device(), &model.slots[*slot]);
    let Some(shards) = model.shards() else { return Ok(part) };
    let held = shards.held().read::<FloatTensor<B>>(*slot, *value_id, purpose);
    if let Some(whole) = held.filter(|whole| whole.device() == device) {
        return Ok(whole);
    }
    if part.dtype() != burn_dtype(s.dtype) {
        let (path, dtype, was) = (&s.path, part.dtype(), s.dtype);
        let why = format!("{path} is {dtype:?}, but the model was wrapped with {was}: wrap it again");
        return Err(shards.fault(why));
    }
    // Cast before it is gathered: half the bytes travel.
    let part = match tap.read_dtype() {
        Some(dtype) => B::float_cast(part, dtype),
        None => part,
    };
    let len_bytes = s.len_elems() * part.dtype().size();
    let is_wanted = shards.held().wants(*slot, purpose, len_bytes);
    let whole = match shards.reach::<B>(&device) {
        true => gather_on_device::<B>(shards, (*slot, *value_id), part, purpose),
        false => gather_in_host_memory::<B>(shards, (*slot, *value_id), part, purpose, is_wanted),
    }?;
    if is_wanted {
        shards.held().hold(*slot, *value_id, len_bytes, &whole);
    }
    Ok(whole)
}

fn gather_on_device<B: GradientMemory>(
    shards: &ShardGroup,
    (slot, value_id): (usize, u64),
    part: FloatTensor<B>,
    purpose: Purpose,
) -> Result<FloatTensor<B>> {
    let s = shards.slot_as(slot, part.dtype());
    let gather = |loan: &mut dyn DeviceLoan| shards.read_on_device(&s, (slot, value_id), loan, purpose);
    on_device::<B>(part, Shape::from(s.dims.clone()), gather, |e| {
        shards.fault(format!("gathering {} on its device failed: {e}", s.path))
    })
}

/// The result is a copy if it is kept for further reads, also where the backend could look at the group's memory: other
/// parameters are gathered there meanwhile.
fn gather_in_host_memory<B: GradientMemory>(
    shards: &ShardGroup,
    (slot, value_id): (usize, u64),
    part: FloatTensor<B>,
    purpose: Purpose,
    is_kept: bool,
) -> Result<FloatTensor<B>> {
    let (device, s) = (part.device(), shards.slot_as(slot, part.dtype()));
    let unreadable = |e| shards.fault(format!("reading {} from its device failed: {e}", s.path));
    let read = |_, part: &[u8]| shards.read(&s, (slot, value_id), part, purpose);
    let view = B::with_bytes(part, read).map_err(unreadable)??;
    let (shape, dtype) = (Shape::from(s.dims.clone()), burn_dtype(s.dtype));
    if B::VIEWS_AVERAGES && !is_kept {
        return Ok(B::from_shared(&shared_bytes(view), 0..s.len_bytes(), shape, dtype, &device));
    }
    let bytes = filled(s.dtype.size_bytes(), view.len(), |out| {
        out.copy_from_slice(&view);
        Ok(())
    })?;
    Ok(B::float_from_data(TensorData::from_bytes(bytes, shape, dtype), &device))
}
