//! Treatment of each parameter and buffer of a model, as a pure function of its description.

use std::collections::VecDeque;

use burn::tensor::DType;

use crate::gradients::Slot;
use crate::model::schema::{Entry, Schema};
use crate::tensor_conversion::comm_dtype;

/// Treatment of one parameter or buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// The gradient is averaged over the ranks.
    Averaged,
    /// Each rank holds a part of the value, and of the average if there is one.
    Sharded,
    /// No gradient as long as the parameter is frozen; the replica check compares its value.
    Frozen,
    /// No slot: a local parameter keeps this rank's gradient; running statistics, quantized values, integers and bools
    /// have none.
    LeftOut,
}

/// Description of one parameter or buffer.
#[derive(Clone, Copy, Debug)]
struct Value {
    dtype: DType,
    /// True if it requires a gradient.
    trainable: bool,
    /// True if Burn's `visit_float` yields it.
    is_float: bool,
    /// True for running statistics.
    is_buffer: bool,
    /// True if the settings leave it to each rank.
    is_local: bool,
    /// True if the settings divide parameters of its shape, and each read of it goes through a tap.
    divides: bool,
}

fn treatment(value: Value) -> Treatment {
    match value {
        Value { is_local: true, .. } => Treatment::LeftOut,
        Value { is_float: false, .. } | Value { is_buffer: true, .. } => Treatment::LeftOut,
        Value { dtype, .. } if !dtype.is_float() => Treatment::LeftOut,
        Value { divides: true, .. } => Treatment::Sharded,
        Value { trainable: true, .. } => Treatment::Averaged,
        Value { trainable: false, .. } => Treatment::Frozen,
    }
}

/// Slot of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: usize,
    /// True unless the parameter is a clone of an earlier one.
    pub(crate) first: bool,
}

/// The slots of a model's gradients, in traversal order, and the slot of each float parameter and buffer, if it has
/// one.
///
/// Averaged, sharded and frozen parameters have slots; clones of a parameter (tied weights) share one. `first_clone`
/// comes from [`Schema::first_clones`], `is_buffer` from [`running_stats::which`](crate::model::running_stats::which);
/// `is_local` has a flag per entry of the schema; `divides` says whether the settings shard a parameter.
pub(super) fn slots(
    schema: &Schema,
    first_clone: &[usize],
    is_buffer: &[bool],
    is_local: &[bool],
    divides: impl Fn(&Entry) -> bool,
) -> (Vec<Slot>, VecDeque<Option<Place>>) {
    let is_tied = |entry: usize| first_clone.iter().filter(|first| **first == first_clone[entry]).count() > 1;
    let floats: Vec<usize> = (0..schema.entries.len()).filter(|&entry| schema.is_float[entry]).collect();
    let has_slot = |(&entry, &is_buffer): (&usize, &bool)| {
        let (dtype, trainable) = (schema.dtypes[entry], schema.entries[entry].trainable);
        let (is_float, is_local) = (schema.is_float[entry], is_local[entry]);
        let described = &schema.entries[entry];
        let divides = divides(described) && !is_tied(entry) && !asks_for_its_shape(&described.path);
        let treatment = treatment(Value { dtype, trainable, is_float, is_buffer, is_local, divides });
        (treatment != Treatment::LeftOut).then_some((entry, treatment == Treatment::Sharded))
    };
    let treated = floats.iter().zip(is_buffer).filter_map(has_slot);
    let treated: Vec<(usize, bool)> = treated.filter(|(entry, _)| first_clone[*entry] == *entry).collect();
    let params: Vec<usize> = treated.iter().map(|(entry, _)| *entry).collect();
    let slot = |&(entry, sharded): &(usize, bool)| Slot {
        sharded,
        path: schema.entries[entry].path.clone(),
        dims: schema.entries[entry].dims.clone(),
        dtype: comm_dtype(schema.dtypes[entry]).expect("checked when the model was inspected"),
        trainable: schema.entries[entry].trainable,
    };
    let place = |entry: &usize| {
        let slot = params.binary_search(&first_clone[*entry]).ok()?;
        Some(Place { slot, first: first_clone[*entry] == *entry })
    };
    let slot_of = floats.iter().map(place).collect();
    (treated.iter().map(slot).collect(), slot_of)
}

/// True for parameters whose shape a forward of Burn takes without `val()`, so that it would see the shape of a part:
/// the first layer of a transformer's feed-forward. Tried with Burn 0.22.1.
fn asks_for_its_shape(path: &str) -> bool {
    path.strip_suffix("linear_inner.weight").is_some_and(|module| module.is_empty() || module.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;
    use burn::tensor::quantization::QuantScheme;

    use super::*;

    const WEIGHT: Value =
        Value { dtype: DType::F32, trainable: true, is_float: true, is_buffer: false, is_local: false, divides: false };

    #[test]
    fn gradients_are_averaged_where_there_can_be_some() {
        assert_eq!(treatment(WEIGHT), Treatment::Averaged);
        assert_eq!(treatment(Value { dtype: DType::BF16, ..WEIGHT }), Treatment::Averaged);
        assert_eq!(treatment(Value { divides: true, ..WEIGHT }), Treatment::Sharded);
        assert_eq!(treatment(Value { trainable: false, divides: true, ..WEIGHT }), Treatment::Sharded);
        assert_eq!(treatment(Value { trainable: false, ..WEIGHT }), Treatment::Frozen);
        let quantized = DType::QFloat(QuantScheme::default());
        for left_out in [
            Value { is_buffer: true, trainable: false, ..WEIGHT },
            Value { is_local: true, ..WEIGHT },
            Value { is_local: true, trainable: false, ..WEIGHT },
            Value { dtype: quantized, trainable: false, ..WEIGHT },
            Value { dtype: DType::I64, trainable: false, is_float: false, ..WEIGHT },
        ] {
            assert_eq!(treatment(left_out), Treatment::LeftOut, "{left_out:?}");
        }
    }

    #[test]
    fn slots_skip_what_is_left_out_and_clones_share_one() {
        let mut schema = Schema::default();
        for (path, dtype, is_float) in [
            ("a", DType::F32, true),
            ("n", DType::I64, false),
            ("mean", DType::F32, true),
            ("own", DType::F32, true),
            ("tied", DType::F32, true),
        ] {
            let trainable = path != "mean" && path != "n";
            schema.entries.push(Entry { path: path.into(), dims: vec![2], dtype: format!("{dtype:?}"), trainable });
            schema.dtypes.push(dtype);
            schema.ids.push(ParamId::new());
            schema.is_float.push(is_float);
        }
        let (slots, slot_of) =
            slots(&schema, &[0, 1, 2, 3, 0], &[false, true, false, false], &[false, false, false, true, false], |_| {
                true
            });
        let place = |first| Some(Place { slot: 0, first });
        assert_eq!(slot_of, [place(true), None, None, place(false)]);
        assert_eq!(slots.iter().map(|slot| slot.path.as_str()).collect::<Vec<_>>(), ["a"]);
        assert!(slots.iter().all(|slot| !slot.sharded), "tied parameters stay whole");
    }
}
