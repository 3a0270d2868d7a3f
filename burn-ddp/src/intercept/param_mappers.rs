//! Records that are loaded into parameters with taps, or taken from them, as the parameters' load and save mappers see.

use std::cell::Cell;

use burn::module::Param;
use burn::tensor::Tensor;

use super::tap_bypass::{bypass, is_bypassed};
use super::wrapped_model::TapHandle;

/// Event of a parameter.
#[derive(Clone, Copy, PartialEq)]
enum Event {
    Read,
    Loaded,
    Saved,
}

thread_local! {
    /// The last of these events on this thread, with model and slot, until the parameter's tap is visited or mapped.
    static LAST: Cell<Option<(Event, u64, usize)>> = const { Cell::new(None) };
    /// True after a save mapper in a bypass has got this rank's part of a sharded parameter.
    static PART_SAVED: Cell<bool> = const { Cell::new(false) };
}

/// Returns `param` with a load mapper and a save mapper that note that a record is loaded or taken, before those that
/// were there. What this crate loads and saves itself keeps ids and is not noted.
pub(super) fn report_records<const D: usize>(param: Param<Tensor<D>>, tap: &TapHandle) -> Param<Tensor<D>> {
    let (model, slot) = (tap.model.id, tap.slot);
    // What is read through the tap of a sharded parameter has all rows; a record would get those of this rank. The
    // mapper stays with the parameter when it is unwrapped, and with one of another shape that is made of it.
    let shards = tap.model.shards().filter(|_| tap.model.is_sharded(slot));
    let part = shards.map(|shards| (shards.part_dims(slot), tap.model.slots[slot].path.clone()));
    let (id, value, mapper) = param.consume();
    let (loading, saving) = (mapper.clone(), mapper.clone());
    let param = Param::from_mapped_value(id, value, mapper);
    let param = param.load_mapper(move |value| {
        if !is_bypassed() {
            LAST.set(Some((Event::Loaded, model, slot)));
        }
        loading.on_load(value)
    });
    param.save_mapper(move |value| {
        let part_of = part.as_ref().filter(|(dims, _)| value.dims()[..] == dims[..]);
        if is_bypassed() {
            if part_of.is_none() {
                return saving.on_save(value);
            }
            note_part();
            return value;
        }
        if let Some((_, path)) = part_of {
            panic!(
                "{path} is sharded, and a record would hold this rank's rows of it: save with `ddp.save(&model, \
                path)`, or `ddp.unwrap(model)` first; after `Param::map` of the field neither is possible: map the \
                module that holds it instead"
            );
        }
        // A visitor sees the parameter without its tap. A program that transforms it itself reads it through the tap.
        let through_tap = LAST.get() == Some((Event::Read, model, slot)) && !value.is_require_grad();
        LAST.set((!through_tap).then_some((Event::Saved, model, slot)));
        saving.on_save(value)
    })
}

/// True if `param`, which has no tap, holds this rank's rows of a sharded parameter, as `Param::map` of a field does.
pub(super) fn is_part<const D: usize>(param: Param<Tensor<D>>) -> bool {
    if !param.is_initialized() {
        return false;
    }
    let (_, value, mapper) = param.consume();
    PART_SAVED.set(false);
    bypass(|| mapper.on_save(value));
    PART_SAVED.take()
}

/// Notes, in the save mapper of a sharded parameter, that its value is this rank's part.
pub(crate) fn note_part() {
    PART_SAVED.set(true);
}

/// Notes that a parameter is read through `tap`.
pub(super) fn note_read(tap: &TapHandle) {
    LAST.set(Some((Event::Read, tap.model.id, tap.slot)));
}

/// True if the mapper that maps `tap` has loaded a record into its parameter: mappers come to a parameter first and
/// then to its tap.
pub(super) fn loads(tap: &TapHandle) -> bool {
    LAST.take() == Some((Event::Loaded, tap.model.id, tap.slot))
}

/// True if the visitor that visits `tap` has taken a record of its parameter.
pub(super) fn saves(tap: &TapHandle) -> bool {
    LAST.take() == Some((Event::Saved, tap.model.id, tap.slot))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::Module;

    use crate::Ddp;
    use crate::intercept::warning_test_model::Pair;

    #[test]
    fn records_taken_before_the_step_load_in_plain_burn() {
        let ranks = Ddp::spawn(2, |ddp| {
            let model = ddp.wrap(Pair::ones())?;
            let loss = if ddp.is_main() { model.a.val() + model.b.val() } else { model.a.val() * 1.0 };
            let grads = loss.backward();
            for copy in [model.clone(), model.clone().no_grad(), model.valid()] {
                Pair::ones().try_load_record(copy.into_record()).map_err(|e| anyhow::anyhow!("{e:?}"))?;
            }
            // No record is taken here: the average waits.
            drop(model.a.transform_for_save());
            drop(model.b.transform_for_save());
            let model = model.step(grads);
            ddp.check_replicas(&model)?;
            Ok(())
        });
        ranks.unwrap();
    }
}
