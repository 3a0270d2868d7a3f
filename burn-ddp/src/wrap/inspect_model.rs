//! Inspection of a model by one rank alone, before the ranks agree on it.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};

use super::{WrapConfig, local_parameters, read_types};
use crate::gradients::OwnRun;
use crate::intercept::{MAX_DIMS, TAP_NAME, find};
use crate::model::running_stats;
use crate::model::schema::Schema;
use crate::precision::Precision;
use crate::{Error, Result};

/// Description of one rank's model.
pub(super) struct Inspected {
    /// Device of the float parameters.
    pub(super) device: Device,
    pub(super) schema: Schema,
    /// See [`Schema::first_clones`].
    pub(super) first_clone: Vec<usize>,
    /// See [`running_stats::which`].
    pub(super) is_buffer: Vec<bool>,
    /// For each entry of the schema, true if it is a local parameter or buffer.
    pub(super) is_local: Vec<bool>,
    /// See [`read_types::halves`].
    pub(super) halves: HashSet<String>,
    /// Paths of the parameters under another reparameterization (LoRA), which get no tap.
    pub(super) bases: HashSet<String>,
}

/// Checks that `model` can be wrapped with `config`, and describes it.
pub(super) fn inspect<M: Module>(model: &M, config: &WrapConfig, run: Option<OwnRun>) -> Result<Inspected> {
    config.check()?;
    if !find(model).is_empty() {
        return Err(Error::invalid("the model is wrapped already; `ddp.unwrap(model)` first to wrap it anew"));
    }
    let mut floats = FloatCheck::default();
    model.visit(&mut floats);
    if let Some(problem) = floats.problem {
        return Err(Error::invalid(problem));
    }
    let Some(device) = floats.device else {
        return Err(Error::invalid("the model has no float parameters: there is nothing to train"));
    };
    crate::device::check_supported(&device)?;
    // Running statistics that `visit` shows may lag one update behind; `valid` brings them up to date.
    drop(model.valid());
    let schema = Schema::of(model)?;
    let first_clone = schema.first_clones(model)?;
    let is_local = local_parameters::select("local parameter", &config.local_parameters, &schema.paths())?;
    refuse_half_local(&schema, &first_clone, &is_local)?;
    let (micro_batches, by) = match run {
        Some(run) => (run.division.of_rank(0).len(), "several logical ranks per process".to_owned()),
        None => (config.micro_batches(), format!("`with_accumulation({})`", config.micro_batches())),
    };
    if micro_batches > 1 {
        let local = schema.entries.iter().zip(&is_local).filter_map(|(entry, is_local)| is_local.then_some(entry));
        local_parameters::refuse_accumulation(&by, local)?;
    }
    let (is_buffer, bases) = (running_stats::which(model), floats.bases);
    let halves = read_types::halves(config, &device, &schema, &is_buffer, (&first_clone, &is_local), &bases)?;
    refuse_scaled(config, &schema, &is_local)?;
    Ok(Inspected { device, schema, first_clone, is_buffer, is_local, halves, bases })
}

/// Refuses a loss scale that gradients would keep, or for which they have no room.
fn refuse_scaled(config: &WrapConfig, schema: &Schema, is_local: &[bool]) -> Result<()> {
    if config.scaling().is_none() {
        return Ok(());
    }
    let mut trained = schema.entries.iter().enumerate().filter(|(_, entry)| entry.trainable);
    if let Some((_, entry)) = trained.clone().find(|(nth, _)| schema.dtypes[*nth] == DType::F16) {
        return Err(Error::invalid(format!(
            "a loss scale keeps small gradients in f32 parameters, and {} is f16 itself: make the model in f32, and \
            let it compute in f16 by `with_compute_dtype`",
            entry.path
        )));
    }
    if config.reduce_dtype == Precision::F16 {
        return Err(Error::invalid(
            "gradients that travel in f16 lose what the loss scale keeps: leave out `with_reduce_dtype`, or reduce in \
            bf16",
        ));
    }
    match trained.find(|(nth, _)| is_local[*nth]) {
        Some((_, entry)) => Err(Error::invalid(format!(
            "a loss scale with a local parameter that is trained ({}) is not possible: train in bf16, or move local \
            parameters to a model of their own",
            entry.path
        ))),
        _ => Ok(()),
    }
}

/// Refuses a model without anything to average, and clones of a parameter of which some are local.
fn refuse_half_local(schema: &Schema, first_clone: &[usize], is_local: &[bool]) -> Result<()> {
    if is_local.iter().all(|is_local| *is_local) {
        return Err(Error::invalid("all parameters are local: nothing of the model is left to average"));
    }
    let paths = schema.paths();
    match first_clone.iter().enumerate().find(|(entry, first)| is_local[*entry] != is_local[**first]) {
        None => Ok(()),
        Some((entry, &first)) => Err(Error::invalid(format!(
            "{} and {} are the same parameter, and one of them is local: name both, or none",
            paths[first], paths[entry]
        ))),
    }
}

/// Name of the first reparameterization of `model` that is not burn-ddp's.
pub(super) fn foreign_reparameterization<M: Module>(model: &M) -> Option<String> {
    struct Foreign(Option<String>);
    impl ModuleVisitor for Foreign {
        fn enter_module(&mut self, name: &str, container: &str) {
            if container == "Reparameterization" && name != TAP_NAME {
                self.0 = Some(name.to_string());
            }
        }
    }
    let mut foreign = Foreign(None);
    model.visit(&mut foreign);
    foreign.0
}

/// Checks float parameters before anything is read.
#[derive(Default)]
struct FloatCheck {
    path: Vec<String>,
    device: Option<Device>,
    /// First problem found.
    problem: Option<String>,
    /// Path of the parameter visited last, and whether it requires a gradient.
    last: Option<(String, bool)>,
    /// Paths of the parameters under another reparameterization.
    bases: HashSet<String>,
}

impl ModuleVisitor for FloatCheck {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization"
            && let Some((base, is_trained)) = self.last.take()
        {
            let problem = is_trained.then(|| {
                format!(
                    "{base} is trained itself and carries the reparameterization {name:?}: Burn keeps one per \
                     parameter, so its gradients could not be averaged; freeze the base (as `apply_lora` does), or \
                     fold it in with `materialize`"
                )
            });
            self.problem = self.problem.take().or(problem);
            self.bases.insert(base);
        }
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let base = param.base();
        let device = base.device();
        let problem = if D == 0 || D > MAX_DIMS {
            Some(format!("{path} has {D} dimensions; burn-ddp handles 1 to {MAX_DIMS}"))
        } else if !base.is_autodiff() {
            Some(format!("{path} is on a device without autodiff: make the model on `device.autodiff()`"))
        } else if self.device.as_ref().is_some_and(|first| *first != device) {
            Some(format!(
                "{path} is on {device:?}, other parameters are on {:?}: a wrapped model lives on one device",
                self.device
            ))
        } else {
            None
        };
        self.problem = self.problem.take().or(problem);
        self.last = Some((path, param.is_require_grad()));
        self.device.get_or_insert(device);
    }
}
