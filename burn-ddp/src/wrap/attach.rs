//! Attaching taps to the parameters of a model that all ranks agreed on.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::Tensor;

use super::treatment::Place;
use crate::ddp::Ddp;
use crate::intercept::{Tap, WrappedModel, cut};

/// The taps of a wrapped model, to attach to its copies. The reducer lives as long as this value or a tapped copy.
pub(crate) struct Taps {
    ddp: Ddp,
    pub(crate) wrapped: Arc<WrappedModel>,
    /// Slot of each float parameter and buffer, in traversal order.
    slot_of: VecDeque<Option<Place>>,
}

impl Taps {
    pub(super) fn new(ddp: &Ddp, wrapped: Arc<WrappedModel>, slot_of: VecDeque<Option<Place>>) -> Self {
        wrapped.count_holder(true);
        Taps { ddp: ddp.clone(), wrapped, slot_of }
    }

    /// Returns `model` with a tap on every parameter that has a slot. `model` is the one that was wrapped, or a copy
    /// with the same parameters and other values.
    pub(crate) fn attach<M: Module>(&self, model: M) -> M {
        let (ddp, wrapped, slot_of) = (self.ddp.clone(), self.wrapped.clone(), self.slot_of.clone());
        model.apply_reparameterization(Attach { ddp, wrapped, slot_of })
    }
}

impl Drop for Taps {
    fn drop(&mut self) {
        self.wrapped.count_holder(false);
    }
}

/// Puts a tap on every float parameter, and cuts sharded ones to this rank's part. The order of calls is the order of
/// slots.
struct Attach {
    ddp: Ddp,
    wrapped: Arc<WrappedModel>,
    /// Slots of the float parameters and buffers that were not visited yet.
    slot_of: VecDeque<Option<Place>>,
}

impl Reparameterizer for Attach {
    type Reparam = Tap;

    fn reparameterize<const D: usize>(&mut self, _: &str, param: Param<Tensor<D>>) -> (Param<Tensor<D>>, Option<Tap>) {
        let slot = self.slot_of.pop_front().expect("map and visit see the same parameters");
        let Some(Place { slot, first }) = slot else { return (param, None) };
        let shards = self.wrapped.shards().filter(|_| self.wrapped.is_sharded(slot));
        let param = match shards.map(|shards| (shards.rows(slot), shards.rank())) {
            // A copy that Burn's trainer holds is cut already: it has fewer rows.
            Some((division, rank)) if param.lazy_shape()[0] == division.rows => cut(param, division.rows_of(rank)),
            _ => param,
        };
        let (param, tap) = Tap::new(self.ddp.clone(), self.wrapped.clone(), slot, first, param);
        (param, Some(tap))
    }
}
