//! Model of two parameters for the tests of warnings, and its step by an optimizer of Burn.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Gradients, Tensor};

/// Two parameters of one element.
#[derive(Module, Debug)]
pub(super) struct Pair {
    pub(super) a: Param<Tensor<1>>,
    pub(super) b: Param<Tensor<1>>,
}

impl Pair {
    /// Both are 1, on Flex with autodiff.
    pub(super) fn ones() -> Self {
        let device = Device::flex().autodiff();
        let one = || Param::from_tensor(Tensor::<1>::ones([1], &device));
        Pair { a: one(), b: one() }
    }

    /// A step of SGD.
    pub(super) fn step(self, grads: Gradients) -> Self {
        let grads = GradientsParams::from_grads(grads, &self);
        SgdConfig::new().init().step(0.1, self, grads)
    }
}
