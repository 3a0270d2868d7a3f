//! Averaging in numbers that can be checked by hand: one weight, one gradient.
//!
//! ```sh
//! cargo run --bin hand_checked_gradient             # one process: gradient 2.0
//! burnrun -n 2 target/debug/hand_checked_gradient   # two ranks: gradient 14.0
//! ```
//!
//! The model is y = w·x. Rank r feeds x = 2r and 2r + 1, and its loss is the sum of y². With w = 1 that makes a
//! gradient of 2·(0² + 1²) = 2 on rank 0 and 2·(2² + 3²) = 26 on rank 1: 14 on average, 28 in total.
#![forbid(unsafe_code)]

use anyhow::Context;
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_ddp::prelude::*;

fn main() -> anyhow::Result<()> {
    burn_ddp_examples::help(include_str!("hand_checked_gradient.rs"));
    let ddp = Ddp::init()?;
    let rank = ddp.rank();

    // Ranks may begin with different weights: `wrap` gives all of them rank 0's.
    let model = linear(rank as f32, &ddp)?;
    let before = weight(&model);
    let model = ddp.wrap(model)?;
    println!("rank {rank}: weight {before:?} before wrap, {:?} after", weight(&model));

    let model = ddp.wrap(linear(1.0, &ddp)?)?;
    println!("rank {rank}: gradient {:?}", gradient(&model, &ddp)?);

    // As torch's DataParallel: right for a loss that is a sum over all items.
    let model = ddp.wrap_with(linear(1.0, &ddp)?, &WrapConfig::new().with_reduction(GradientReduction::Sum))?;
    println!("rank {rank}: gradient in sum mode {:?}", gradient(&model, &ddp)?);

    Ok(ddp.finish()?)
}

/// y = w·x
fn linear(w: f32, ddp: &Ddp) -> anyhow::Result<Linear> {
    let device = ddp.device()?.autodiff();
    let mut model = LinearConfig::new(1, 1).with_bias(false).init(&device);
    model.weight = Param::from_tensor(Tensor::from_floats([[w]], &device));
    Ok(model)
}

/// Gradient of the weight over all ranks.
fn gradient(model: &Linear, ddp: &Ddp) -> anyhow::Result<f32> {
    let first = 2.0 * ddp.rank() as f32;
    let x = Tensor::<2>::from_floats([[first], [first + 1.0]], &ddp.device()?.autodiff());
    let loss = model.forward(x).powi_scalar(2).sum();
    let grads = ddp.backward(&loss, model)?.context("each backward is a step")?;
    Ok(grads.get::<2>(model.weight.id).context("the weight has no gradient")?.into_scalar())
}

fn weight(model: &Linear) -> f32 {
    model.weight.val().into_scalar()
}
