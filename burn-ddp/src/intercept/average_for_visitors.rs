//! Shows visitors the average of a parameter that this rank did not use, in the form of a parameter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor};

use super::model_walk::TAP_NAME;

/// Shows `visitor` a parameter whose average is on `leaf`. Returns true if the visitor has read its value with `val()`,
/// as `GradientsParams::from_grads` does to take a gradient. Visitors that only look at gradients, as for a norm, look
/// them up with `base()`: `val()` is no leaf where a parameter has a tap.
pub(super) fn show<const D: usize>(id: ParamId, leaf: Tensor<D>, visitor: &mut impl ModuleVisitor) -> bool {
    let probe = Probe(Arc::default());
    let shown = Param::initialized(id, leaf).apply_reparameterization(Attach(probe.clone()));
    visitor.visit_float(&shown);
    probe.0.load(Ordering::Relaxed)
}

/// Identity that notes that the value is read.
#[derive(Clone, Debug)]
struct Probe(Arc<AtomicBool>);

impl Reparameterization for Probe {
    const NAME: &'static str = TAP_NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        self.0.store(true, Ordering::Relaxed);
        base
    }
}

/// A probe owns no parameters.
impl Module for Probe {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _: &mut V) {}

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }

    fn materialize(self) -> Self {
        self
    }
}

struct Attach(Probe);

impl Reparameterizer for Attach {
    type Reparam = Probe;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Probe>) {
        (param, Some(self.0.clone()))
    }
}
