//! The parameter that a tap stands for.

use std::sync::Arc;

use burn::tensor::FloatDType;

use super::wrapped_model::WrappedModel;

/// A parameter of a wrapped model. Opaque: made by `wrap`, passed through [`DdpBackend`](super::DdpBackend).
#[derive(Clone, Debug)]
pub struct TapHandle {
    pub(super) model: Arc<WrappedModel>,
    pub(super) slot: usize,
    /// True unless the parameter is a clone of an earlier one, with which it shares the slot.
    pub(super) first: bool,
    /// Number of the parameter's value in this copy. Copies whose values may differ have different numbers, which are
    /// the same on every rank.
    pub(super) value_id: u64,
    /// True if the parameter is sharded and a mapper has come to it in this copy of which the program did not say that
    /// it treats each element by itself.
    pub(super) mixed: bool,
    /// True for a read of the value that the optimizer steps, whatever the type in which the model computes.
    pub(super) reads_master: bool,
}

impl TapHandle {
    /// The type to which a read casts the value.
    pub(super) fn read_dtype(&self) -> Option<FloatDType> {
        self.model.compute_dtype(self.slot).filter(|_| !self.reads_master)
    }
}
