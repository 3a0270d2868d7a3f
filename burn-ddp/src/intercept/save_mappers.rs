//! Save mappers of parameters with taps, which keep this rank's part of a sharded parameter out of records.
//!
//! Burn leaves the mappers on a parameter whose tap is gone. [`without_mappers`] takes them off.

use burn::module::{Module, ModuleMapper, Param, ParamMapper};
use burn::tensor::Tensor;

use super::tap_bypass::{answers, ask, bypass, is_bypassed};
use super::tap_handle::TapHandle;
use crate::gradients::Slot;

/// Why a value without a tap is this rank's part.
const TAP_IS_GONE: &str = "is no longer tapped: `Param::map` made a new parameter of it; use `Module::map` on the \
    module that holds it, which keeps the tap";

/// Returns `param` with a save mapper that refuses records of this rank's part, and then calls the mapper that it had.
/// Saves by this crate go on with the part.
pub(super) fn refuse_records_of_parts<const D: usize>(param: Param<Tensor<D>>, tap: &TapHandle) -> Param<Tensor<D>> {
    let (slots, slot) = (tap.model.slots.clone(), tap.slot);
    let (is_sharded, is_divided) = (tap.model.is_sharded(slot), tap.model.is_divided(slot));
    let (id, value, mapper) = param.consume();
    let saving = mapper.clone();
    Param::from_mapped_value(id, value, mapper).save_mapper(move |value| {
        let Slot { path, dims, .. } = &slots[slot];
        // A read through the tap has all rows. A value of another shape is a part, or was made of one by `Param::map`.
        let is_part = is_sharded && value.dims()[..] != dims[..];
        if answers(&saving, is_part.then_some(TAP_IS_GONE)) {
            return value;
        }
        // In a world of 1, where the part is the whole, it is refused as well if it comes without its tap.
        let is_refused = is_part || is_divided && !is_sharded && value.is_require_grad();
        assert!(
            is_bypassed() || !is_refused,
            "{path} is sharded, and a record would hold this rank's rows of it: save with `ddp.save(&model, path)`, \
            or, unless the model has LoRA, `ddp.unwrap(model)` first. Neither is possible after `Param::map` of the \
            field: map the module that holds it instead"
        );
        if is_part { value } else { saving.on_save(value) }
    })
}

/// Why `param`, which has no tap, holds this rank's rows of a sharded parameter, if it does.
pub(super) fn why_part<const D: usize>(param: Param<Tensor<D>>) -> Option<&'static str> {
    if !param.is_initialized() {
        return None;
    }
    let (_, value, mapper) = param.consume();
    bypass(|| ask(&mapper, &value))?.1
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
            let wrapped = |mapper: &ParamMapper<Tensor<D>>| ask(mapper, &value).map(|(inner, _)| inner);
            let mut inner = wrapped(&mapper);
            while let Some(more) = inner.as_ref().and_then(&wrapped) {
                inner = Some(more);
            }
            let param = Param::from_mapped_value(id, value, mapper);
            let Some(inner) = inner else { return param };
            // The mapper as a whole says whether the parameter was trained when it was wrapped, which may have changed.
            let (loading, saving) = (inner.clone(), inner);
            param
                .load_mapper(move |value| loading.on_load(value))
                .save_mapper(move |value| if answers(&saving, None) { value } else { saving.on_save(value) })
        }
    }
    bypass(|| model.map(&mut Restore))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::{Lora, Module};
    use burn::nn::LinearConfig;

    use crate::intercept::tests::Pair;
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
}
