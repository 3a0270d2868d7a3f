//! Training of logical ranks with dropout and running statistics, whose bits must not depend on the processes.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::tensor::DType;
use burn_ddp::prelude::*;
use burn_ddp_tests::rows;

struct Rows;

impl Batcher<usize, Tensor<2>> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<2> {
        Tensor::cat(items.into_iter().map(|item| rows(item, 1, 6, 1, DType::F32, device)).collect(), 0)
    }
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    last: Linear,
}

impl Net {
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let h = self.norm.forward(self.first.forward(x)).tanh();
        self.last.forward(self.dropout.forward(h)).powf_scalar(2.0).mean()
    }
}

/// `rank logical COUNT`: two epochs of steps of `COUNT` leaves. Prints the hash of the model and the mean loss of the
/// last epoch.
pub(crate) fn run(ddp: &Ddp) -> anyhow::Result<()> {
    let count = std::env::args().nth(2).unwrap_or_default().parse()?;
    ddp.set_logical_ranks(count)?;
    let device = ddp.device()?.autodiff();
    ddp.seed(&device, 5);
    let (first, last) = (LinearConfig::new(6, 8).init(&device), LinearConfig::new(8, 6).init(&device));
    let net = Net { first, norm: BatchNormConfig::new(8).init(&device), dropout: DropoutConfig::new(0.5).init(), last };
    let mut net = ddp.wrap_with(net, &WrapConfig::new().with_exact(true))?;
    let mut optim = ddp.optimizer(AdamConfig::new().init(), &net)?;
    let train = ddp.loader(Rows).batch_size(3).shuffle(3).build(InMemDataset::new((0..count * 7 + 2).collect()))?;
    let mut mean = 0.0;
    for mut epoch in train.epochs(0..2) {
        let mut losses = ddp.exact_sums();
        while let Some(batch) = epoch.next() {
            let loss = net.loss(batch?);
            losses.add(loss.clone().into_scalar(), epoch.batch_items() as f64);
            if let Some(grads) = ddp.backward(&loss, &net)? {
                net = optim.step(0.01, net, grads);
            }
        }
        mean = losses.mean()?;
    }
    println!("result {} {:x}", param_hash(&net)?, mean.to_bits());
    // What `exact` refuses of later calls.
    let refused = [ddp.mean(1.0).map(drop), ddp.sum(1.0_f32).map(drop), ddp.join(&mut net, &mut optim).map(drop)];
    for error in refused {
        anyhow::ensure!(error.is_err_and(|error| error.to_string().contains("`exact`")), "it was not refused");
    }
    anyhow::ensure!(ddp.sum(1_usize)? == ddp.world_size());
    Ok(())
}
