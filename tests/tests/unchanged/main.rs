//! What must change no bit of a training: batches of weight 0, and calls that only look at it.

mod looks;
mod weight_0;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::TensorData;
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;
use burn_ddp_tests::Fill;

/// Two layers, with the normalisation that a case wants between them.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: Option<BatchNorm>,
    synced: Option<SyncBatchNorm>,
    last: Linear,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    None,
    Own(BufferPolicy),
    Synced,
}

impl Net {
    fn new(norm: Norm, device: &Device) -> Net {
        let batch_norm = || -> BatchNorm { BatchNormConfig::new(4).init(device) };
        let net = Net {
            first: LinearConfig::new(3, 4).init(device),
            norm: matches!(norm, Norm::Own(_)).then(batch_norm),
            synced: (norm == Norm::Synced).then(|| batch_norm().into()),
            last: LinearConfig::new(4, 2).init(device),
        };
        net.map(&mut Fill(1.0))
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut h = self.first.forward(x);
        if let Some(norm) = &self.norm {
            h = norm.forward(h);
        }
        if let Some(norm) = &self.synced {
            h = norm.forward(h);
        }
        self.last.forward(h.tanh())
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.forward(x).powi_scalar(2).mean()
    }
}

/// Rows of the micro-batch `nth` of a rank: other ones for every rank and micro-batch.
fn rows_of(rank: usize, nth: usize, rows: usize, device: &Device) -> Tensor<2> {
    let start = 97 * rank + 13 * nth;
    let ramp = Tensor::<1, Int>::arange(start as i64..(start + 3 * rows) as i64, device).float();
    (ramp * 0.37).sin().reshape([rows, 3])
}

struct Values(Vec<TensorData>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.base().into_data());
    }
}

/// Values of parameters and running statistics, as a visitor sees them.
fn visited(net: &Net) -> Vec<TensorData> {
    let mut values = Values(Vec::new());
    net.visit(&mut values);
    values.0
}
