//! Gradients of sharded parameters: summed over reads and micro-batches, then reduced to the average of a part.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::TensorData;

use super::shard_group::ShardGroup;
use crate::Result;
use crate::convert::{burn_dtype, comm_dtype};
use crate::gradients::{Contribution, GradientMemory, MicroBatch, Slot, Sum};

/// Gradients of the sharded parameters of one wrapped model on backend `B`.
pub(in crate::intercept) struct ShardedGradients<B: Backend> {
    slots: Vec<State<B>>,
    /// The ranks' weights in the running backward, once the first gradient is reduced.
    weights: Option<Vec<f64>>,
}

struct State<B: Backend> {
    /// Sum over micro-batches, of the whole parameter.
    held: Option<Sum>,
    /// True if a micro-batch since the last reduction had a gradient.
    pending: bool,
    /// Average of this rank's part.
    average: Option<FloatTensor<B>>,
}

impl<B: GradientMemory> ShardedGradients<B> {
    pub(in crate::intercept) fn new(slots: usize) -> Self {
        let state = |_| State { held: None, pending: false, average: None };
        ShardedGradients { slots: (0..slots).map(state).collect(), weights: None }
    }

    /// Takes the gradient of a slot in this backward. *Collective* if the backward reduces.
    pub(in crate::intercept) fn put(
        &mut self,
        shards: &ShardGroup,
        s: &Slot,
        slot: usize,
        gradient: FloatTensor<B>,
        micro_batch: MicroBatch,
    ) -> Result<()> {
        let (device, shape, dtype) = (gradient.device(), gradient.shape(), gradient.dtype());
        if shape.to_vec() != s.dims || comm_dtype(dtype) != Some(s.dtype) {
            let (path, dims, expected) = (&s.path, &s.dims, s.dtype);
            return Err(shards.fault(format!(
                "the gradient of {path} is {:?} {dtype:?}, and not {dims:?} {expected}",
                shape.to_vec()
            )));
        }
        let unreadable = |reason| shards.fault(format!("reading the gradient of {}: {reason}", s.path));
        let state = &mut self.slots[slot];
        state.pending = true;
        let mut whole = None;
        match micro_batch.contribution {
            Contribution::Ignored => {}
            Contribution::Whole => {
                whole = Some(B::with_bytes(gradient, |_, bytes| bytes.to_vec()).map_err(unreadable)?);
            }
            Contribution::Added(weight) => {
                let sum = state.held.get_or_insert_with(|| Sum::zeros(s.dtype, s.len_elems()));
                B::with_bytes(gradient, |_, bytes| sum.add(s.dtype, bytes, weight)).map_err(unreadable)?;
            }
        }
        if !micro_batch.reducing {
            return Ok(());
        }
        let whole = whole.unwrap_or_else(|| {
            let mut bytes = vec![0; s.len_bytes()];
            if let Some(sum) = state.held.take() {
                sum.write(s.dtype, micro_batch.divisor, &mut bytes);
            }
            bytes
        });
        if let (None, Some(weight)) = (&self.weights, micro_batch.weight_of_mean) {
            self.weights = Some(shards.weights(weight)?);
        }
        let part = shards.reduce(slot, whole, self.weights.as_deref())?;
        let mut dims = s.dims.clone();
        dims[0] = shards.rows(slot).of(shards.rank()).len();
        let state = &mut self.slots[slot];
        state.pending = false;
        state.average = Some(B::float_from_data(TensorData::from_bytes_vec(part, dims, burn_dtype(s.dtype)), &device));
        Ok(())
    }

    /// First slot with a gradient of an earlier micro-batch that the backward which reduces has not reached.
    pub(in crate::intercept) fn unreduced(&self) -> Option<usize> {
        self.slots.iter().position(|state| state.pending)
    }

    /// The average of a slot's part, once.
    pub(in crate::intercept) fn take(&mut self, slot: usize) -> Option<FloatTensor<B>> {
        self.slots[slot].average.take()
    }

    /// Ends a backward: the next one has other weights.
    pub(in crate::intercept) fn end_backward(&mut self) {
        self.weights = None;
        self.slots.iter_mut().for_each(|state| state.average = None);
    }

    /// Drops gradients that were not reduced.
    pub(in crate::intercept) fn clear(&mut self) {
        self.end_backward();
        for state in &mut self.slots {
            state.held = None;
            state.pending = false;
        }
    }
}
