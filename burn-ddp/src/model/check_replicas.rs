//! `check_replicas`: comparison of the ranks' models outside of a backward.

use burn::module::Module;

use super::digest::{Comparison, differing, digest};
use super::parameter_movement::{Movement, Sketch, from_row, to_row, tolerance};
use super::running_stats;
use super::values::values;
use crate::ddp::Ddp;
use crate::intercept::taps;
use crate::tensor_conversion::comm_dtype;
use crate::wrap::wrapped_in;
use crate::{Error, Result, agreement};

impl Ddp {
    /// Checks that all ranks hold the same parameters, apart from differences by rounding. *Collective*.
    ///
    /// A float parameter of a wrapped model whose bits differ is judged by how far it has moved, as in the
    /// [comparison of steps](crate::WrapConfig::with_replica_check): a difference by rounding is counted and logged as
    /// a warning, a larger one is an error. All other parameters must have the same bits, and so must all parameters of
    /// a model that is not wrapped, or wrapped with
    /// [`with_exact_replicas`](crate::WrapConfig::with_exact_replicas). Running statistics are not compared, nor are
    /// [local](crate::WrapConfig::with_local_parameters) and [sharded](crate::WrapConfig::with_sharding) parameters.
    ///
    /// Costs three rounds of small messages, the last with 8 bytes per parameter; if
    /// float parameters differ, further rounds, with 1,000 bytes for each of these parameters.
    ///
    /// # Errors
    ///
    /// [`Error::ReplicasDiffer`](crate::Error::ReplicasDiffer) on every rank, naming the first parameter that differs
    /// and the rank.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{module::Param, nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let errors = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let mut model: Linear = ddp.wrap(LinearConfig::new(2, 1).init(&device))?;
    ///     ddp.check_replicas(&model)?;
    ///     if ddp.rank() == 1 {
    ///         model.weight = Param::from_tensor(Tensor::zeros([2, 1], &device)); // a bug
    ///     }
    ///     Ok(ddp.check_replicas(&model).unwrap_err().to_string())
    /// })?;
    /// assert!(errors[0].contains("weight") && errors[0] == errors[1], "{errors:?}");
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn check_replicas<M: Module>(&self, model: &M) -> Result<()> {
        let group = self.group();
        let wrapped = wrapped_in(group, model)?;
        let (schema, values) = agreement::on_outcome(group, "read its parameters", values(model))?;
        let mut is_buffer = running_stats::which(model).into_iter();
        let is_parameter = |entry: &usize| !(schema.is_float[*entry] && is_buffer.next().unwrap_or(false));
        let is_shared = |entry: &usize| {
            let (value, id) = (&values[*entry], schema.ids[*entry]);
            !value.is_sharded() && !wrapped.iter().any(|wrapped| wrapped.is_local(&value.path, id))
        };
        let compared: Vec<usize> = (0..values.len()).filter(is_parameter).filter(is_shared).collect();
        let paths: Vec<&str> = compared.iter().map(|entry| schema.entries[*entry].path.as_str()).collect();
        let own = compared.iter().map(|entry| Ok(digest(values[*entry].own()?.as_bytes()))).collect();
        let own: Vec<i64> = agreement::on_outcome(group, "read its parameters", own)?;
        let digests = group.all_gather_object(&own)?;
        let comparison = Comparison { paths: &paths, ranks: group.ranks(), digests: &digests, step: None };
        let (differing, taps) = (differing(&digests), taps(model));
        let exact = taps.is_empty() || taps.values().any(|tap| !tap.judges_movements());
        if differing.is_empty() || exact {
            let outcome = comparison.exactly();
            return if taps.is_empty() { outcome.map_err(not_wrapped) } else { outcome };
        }
        let movement = |&i: &usize| match taps.get(paths[i]) {
            Some(tap) => Ok(tap.movement_until(&Sketch::of(&values[compared[i]].own()?))),
            None => Ok(Movement::UNKNOWN),
        };
        let movements = differing.iter().map(movement).collect::<Result<Vec<_>>>();
        let own = to_row(agreement::on_outcome(group, "read its parameters", movements)?.into_iter());
        let movements: Vec<Vec<Movement>> = group.all_gather(&own)?.chunks(own.len()).map(from_row).collect();
        let tolerance = |entry: &usize| comm_dtype(schema.dtypes[*entry]).map_or(0.0, tolerance);
        let tolerances: Vec<f64> = compared.iter().map(tolerance).collect();
        if let Some(rounding) = comparison.by_movement(&movements, &tolerances)? {
            self.state().meter.rounded(&rounding, None, true);
        }
        Ok(())
    }
}

/// Adds the most likely cause to the error.
fn not_wrapped(error: Error) -> Error {
    match error {
        Error::ReplicasDiffer { step, parameter, ranks, difference } => {
            let difference = format!(
                "{difference}; the model is not wrapped, so each rank may have trained its own: \
                `let model = ddp.wrap(model)?` before training"
            );
            Error::ReplicasDiffer { step, parameter, ranks, difference }
        }
        other => other,
    }
}
