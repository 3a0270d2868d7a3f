//! Records that are loaded into parameters with taps: they may change the parameters' ids.

use std::cell::Cell;

use burn::module::Param;
use burn::tensor::Tensor;

use super::wrapped_model::TapHandle;

thread_local! {
    /// Model and slot of the parameter that a record was loaded into last on this thread, until its tap is mapped.
    static LOADED: Cell<Option<(u64, usize)>> = const { Cell::new(None) };
}

/// Returns `param` with a load mapper that notes that a record is loaded, before the one that was there.
pub(super) fn report_loads<const D: usize>(param: Param<Tensor<D>>, tap: &TapHandle) -> Param<Tensor<D>> {
    let of = (tap.model.id, tap.slot);
    let (id, value, mapper) = param.consume();
    let earlier = mapper.clone();
    Param::from_mapped_value(id, value, mapper).load_mapper(move |value| {
        LOADED.set(Some(of));
        earlier.on_load(value)
    })
}

/// True if the mapper that maps `tap` has loaded a record into its parameter: mappers come to a parameter first and
/// then to its tap.
pub(super) fn loads(tap: &TapHandle) -> bool {
    LOADED.take() == Some((tap.model.id, tap.slot))
}
