//! Load and save mappers of parameters with taps, which notice that a record is loaded into them or taken from them.
//!
//! Burn leaves the mappers on a parameter whose tap is gone. [`without_mappers`] takes them off.

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
    /// Why the value is not whole, after a save mapper in a bypass was given this rank's part of a sharded parameter.
    static PART_SAVED: Cell<Option<&'static str>> = const { Cell::new(None) };
    /// Question to the save mapper that is called next, and its answer.
    static AROUND: RefCell<Around> = const { RefCell::new(Around::NotAsked) };
}

/// Question to a save mapper of this crate, which mappers it wraps, and the answer.
enum Around {
    NotAsked,
    Asked,
    /// A `ParamMapper`.
    Answered(Box<dyn Any>),
}

/// Reason of [`note_part`] where the tap is gone.
const TAP_IS_GONE: &str = "is no longer tapped: `Param::map` made a new parameter of it; use `Module::map` on the \
    module that holds it, which keeps the tap";

/// Returns `param` with a load mapper and a save mapper that note that a record is loaded or taken, and then call the
/// mappers that it had. Loads and saves by this crate keep ids, and are not noted.
pub(super) fn report_records<const D: usize>(param: Param<Tensor<D>>, tap: &TapHandle) -> Param<Tensor<D>> {
    let (model, slot) = (tap.model.id, tap.slot);
    // A read through the tap of a sharded parameter has all rows; a record would have this rank's rows.
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
        // A value of another shape than the whole is a part, or was made of one by `Param::map`.
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
                path)`, or, unless the model has LoRA, `ddp.unwrap(model)` first. Neither is possible after \
                `Param::map` of the field: map the module that holds it instead"
            );
        }
        // A visitor saves the parameter without its tap; a program that saves it by itself reads it through the tap.
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

/// True if [`without_mappers`] asks the save mapper that calls this which mappers it wraps: `inner` is the answer, and
/// the mapper returns its value as it is.
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

/// The mappers that `mapper` wraps, if it is one of this crate.
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
    use burn::module::{Lora, Module};
    use burn::nn::LinearConfig;

    use crate::intercept::warning_test_model::Pair;
    use crate::{Ddp, Sharding, WrapConfig, param_hash};

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

    /// What the panic of a record of a sharded model advises.
    #[test]
    fn a_sharded_model_with_lora_is_saved_and_not_unwrapped() {
        let directory = tempfile::tempdir().unwrap();
        let ranks = Ddp::spawn(2, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = LinearConfig::new(64, 64).init(&device).freeze().apply_lora(Lora::new(4, 8.0));
            let config = WrapConfig::new().with_sharding(Sharding::Parameters).with_sharding_above(1);
            let model = ddp.wrap_with(model, &config)?;
            let refused = ddp.unwrap(model.clone()).unwrap_err().to_string();
            assert!(refused.contains("beside burn-ddp's"), "{refused}");
            let path = ddp.save(&model, directory.path().join("model"))?;
            let plain = LinearConfig::new(64, 64).init(&device).freeze().apply_lora(Lora::new(4, 8.0)).load_file(&path);
            assert_eq!(param_hash(&plain)?, param_hash(&model)?);
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
