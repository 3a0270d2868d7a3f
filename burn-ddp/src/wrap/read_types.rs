//! Types in which the parameters of a model are read.

use std::collections::HashSet;

use burn::tensor::{DType, Device, FloatDType};

use super::WrapConfig;
use super::local_parameters::select;
use crate::gradients::Slot;
use crate::model::schema::Schema;
use crate::precision::Precision;
use crate::{Error, Result};

/// Paths of the parameters that are read in half precision; none without mixed precision. `is_buffer` has a flag for
/// each float of the schema, `first_clone` and `is_local` are by entry; `bases` are read by another reparameterization.
///
/// # Errors
///
/// [`Error::Invalid`] if `device` or a parameter cannot be.
pub(super) fn halves(
    config: &WrapConfig,
    device: &Device,
    schema: &Schema,
    is_buffer: &[bool],
    (first_clone, is_local): (&[usize], &[bool]),
    bases: &HashSet<String>,
) -> Result<HashSet<String>> {
    let paths = schema.paths();
    let is_full = select("name in `with_full_precision`", &config.full_precision, &paths)?;
    if let Some((entry, &first)) =
        first_clone.iter().enumerate().find(|(entry, first)| is_full[*entry] != is_full[**first])
    {
        return Err(Error::invalid(format!(
            "{} and {} are the same parameter, and `with_full_precision` names one of them: name both, or none",
            paths[first], paths[entry]
        )));
    }
    let precision = config.compute_dtype;
    if precision == Precision::F32 {
        return Ok(HashSet::new());
    }
    if !device.supports_dtype(DType::from(precision.dtype())) {
        return Err(Error::invalid(format!("{device:?} does not compute in {precision}")));
    }
    let mut halves = HashSet::new();
    let floats = (0..paths.len()).filter(|entry| schema.is_float[*entry]).zip(is_buffer);
    for (entry, _) in floats.filter(|(entry, is_buffer)| !**is_buffer && !is_full[*entry]) {
        let (path, dtype) = (paths[entry], schema.dtypes[entry]);
        if !dtype.is_float() || bases.contains(path) {
            continue;
        }
        if is_local[entry] {
            return Err(Error::invalid(format!(
                "the local parameter {path} is read as it is, in {dtype:?}, and the model computes in {precision}: \
                name it in `with_full_precision`, too, and cast what goes into its layer"
            )));
        }
        if dtype != DType::F32 {
            return Err(Error::invalid(format!(
                "{path} is {dtype:?}; with a compute dtype of {precision} parameters are kept in f32: make the model \
                in f32, or name it in `with_full_precision`"
            )));
        }
        halves.insert(path.to_owned());
    }
    Ok(halves)
}

/// Type to which reads of each slot cast.
pub(super) fn of_slots(config: &WrapConfig, slots: &[Slot], halves: &HashSet<String>) -> Vec<Option<FloatDType>> {
    slots.iter().map(|slot| halves.contains(&slot.path).then(|| config.compute_dtype.dtype())).collect()
}
