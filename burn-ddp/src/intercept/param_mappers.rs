//! Records that are loaded into parameters with taps, or taken from them, as the parameters' load and save mappers see.
//!
//! Burn leaves mappers on a parameter whose tap is gone. [`without_mappers`] takes them off.

use std::any::Any;
use std::cell::{Cell, RefCell};

use burn::module::{Module, ModuleMapper, Param, ParamMapper};
use burn::tensor::Tensor;

use super::tap_bypass::{bypass, is_bypassed};
use super::wrapped_model::TapHandle;
use crate::gradients::Slot;

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
    /// Why it is not whole, after a save mapper in a bypass has got this rank's part of a sharded parameter.
    static PART_SAVED: Cell<Option<&'static str>> = const { Cell::new(None) };
    /// Question to the save mapper that is called next, and its answer.
    static AROUND: RefCell<Around> = const { RefCell::new(Around::NotAsked) };
}

/// Question to a save mapper of this crate for the mappers that it was put around.
enum Around {
    NotAsked,
    Asked,
    /// A `ParamMapper`.
    Answered(Box<dyn Any>),
}

/// Reason of [`note_part`] where the tap is gone.
const TAP_IS_GONE: &str = "is no longer tapped: `Param::map` made a new parameter of it; use `Module::map` on the \
    module that holds it, which keeps the tap";

/// Returns `param` with a load mapper and a save mapper that note that a record is loaded or taken, before those that
/// were there. What this crate loads and saves itself keeps ids and is not noted.
pub(super) fn report_records<const D: usize>(param: Param<Tensor<D>>, tap: &TapHandle) -> Param<Tensor<D>> {
    let (model, slot) = (tap.model.id, tap.slot);
    // What is read through the tap of a sharded parameter has all rows; a record would get those of this rank.
    let whole = tap.model.is_sharded(slot).then(|| tap.model.slots.clone());
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
        if answers(&saving) {
            return value;
        }
        // Also what `Param::map` makes of a part, of any shape, is no whole.
        let part_of = whole.as_ref().map(|slots| &slots[slot]).filter(|whole| value.dims()[..] != whole.dims[..]);
        if is_bypassed() {
            if part_of.is_none() {
                return saving.on_save(value);
            }
            note_part(TAP_IS_GONE);
            return value;
        }
        if let Some(Slot { path, .. }) = part_of {
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

/// Why `param`, which has no tap, holds this rank's rows of a sharded parameter, if it does.
pub(super) fn why_part<const D: usize>(param: Param<Tensor<D>>) -> Option<&'static str> {
    if !param.is_initialized() {
        return None;
    }
    let (_, value, mapper) = param.consume();
    PART_SAVED.set(None);
    bypass(|| mapper.on_save(value));
    PART_SAVED.take()
}

/// Notes, in the save mapper of a sharded parameter, that its value is this rank's part, and why.
pub(crate) fn note_part(why: &'static str) {
    PART_SAVED.set(Some(why));
}

/// True if [`without_mappers`] asks the save mapper that calls this for the mappers that it was put around: they are
/// the answer, and the mapper returns its value as it is.
pub(crate) fn answers<const D: usize>(inner: &ParamMapper<Tensor<D>>) -> bool {
    AROUND.with_borrow_mut(|around| {
        let asked = matches!(around, Around::Asked);
        if asked {
            *around = Around::Answered(Box::new(inner.clone()));
        }
        asked
    })
}

/// `model`, which has no tap, with the load and save mappers that its parameters had before this crate added its own.
pub(crate) fn without_mappers<M: Module>(model: M) -> M {
    struct Restore;
    impl ModuleMapper for Restore {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !param.is_initialized() {
                return param;
            }
            let (id, value, mapper) = param.consume();
            let mut inner = around(&mapper, &value);
            while let Some(more) = inner.as_ref().and_then(|inner| around(inner, &value)) {
                inner = Some(more);
            }
            let param = Param::from_mapped_value(id, value, mapper);
            let Some(inner) = inner else { return param };
            // The mapper as a whole says whether the parameter was trained when it was wrapped, which may have changed.
            let (loading, saving) = (inner.clone(), inner);
            param.load_mapper(move |value| loading.on_load(value)).save_mapper(move |value| match answers(&saving) {
                true => value,
                false => saving.on_save(value),
            })
        }
    }
    bypass(|| model.map(&mut Restore))
}

/// The mappers that `mapper` was put around, if it is one of this crate.
fn around<const D: usize>(mapper: &ParamMapper<Tensor<D>>, value: &Tensor<D>) -> Option<ParamMapper<Tensor<D>>> {
    AROUND.set(Around::Asked);
    mapper.on_save(value.clone());
    match AROUND.replace(Around::NotAsked) {
        Around::Answered(inner) => inner.downcast().ok().map(|inner| *inner),
        _ => None,
    }
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
    fn unwrap_leaves_the_mappers_and_states_that_a_program_gave() {
        let ranks = Ddp::spawn(2, |ddp| {
            let mut model = Pair::ones();
            model.a = model.a.save_mapper(|value| value * 2.0).load_mapper(|value| value / 4.0);
            for _ in 0..3 {
                model = ddp.unwrap(ddp.wrap(model)?)?;
            }
            let one = |model: &Pair| model.a.base().into_scalar::<f32>();
            assert_eq!(model.a.transform_for_save().base().into_scalar::<f32>(), 2.0);
            assert_eq!(one(&model.clone().load_record(model.clone().into_record())), 0.5);
            assert_eq!(one(&ddp.wrap(model.clone())?.load_record(model.clone().into_record())), 0.5);
            // Frozen after it was wrapped.
            let frozen = ddp.unwrap(ddp.wrap(model.clone())?.no_grad())?;
            assert!(!frozen.a.is_require_grad() && !frozen.valid().train().a.is_require_grad());
            assert!(ddp.unwrap(ddp.wrap(model)?.valid())?.train().a.is_require_grad());
            Ok(())
        });
        ranks.unwrap();
    }

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
