//! Models that are not a plain struct of layers.

use anyhow::Result;
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;

use super::{Outcome, Run, adam};

fn linear(run: &Run) -> Linear {
    LinearConfig::new(6, 6).init(&run.device)
}

/// Trains with a forward that may use different layers for each step and part.
fn train<M: Module + 'static>(
    run: &Run,
    model: M,
    forward: impl Fn(&M, Tensor<2>, usize) -> Tensor<2>,
) -> Result<Outcome> {
    let mut model = run.wrap(run.fill(model))?;
    let mut optim = adam();
    for step in 0..6 {
        let loss =
            run.over_parts(|part| forward(&model, run.x(step, part), (part / 2 + step) % 3).powf_scalar(2.0).sum());
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// Layers in a `Vec`; each part of the batch skips some of them.
pub(super) fn vectors(run: &Run) -> Result<Outcome> {
    let model: Vec<Linear> = (0..4).map(|_| linear(run)).collect();
    train(run, model, |model, x, choice| {
        model.iter().enumerate().filter(|(i, _)| i % 3 != choice).fold(x, |h, (_, layer)| layer.forward(h).tanh())
    })
}

#[derive(Module, Debug)]
struct Optional {
    always: Linear,
    sometimes: Option<Linear>,
    never: Option<Linear>,
}

pub(super) fn options(run: &Run) -> Result<Outcome> {
    let model = Optional { always: linear(run), sometimes: Some(linear(run)), never: None };
    train(run, model, |model, x, choice| {
        let h = model.always.forward(x).tanh();
        assert!(model.never.is_none());
        match &model.sometimes {
            Some(layer) if choice == 0 => layer.forward(h),
            _ => h,
        }
    })
}

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
enum Layer {
    Dense(Linear),
    Norm(LayerNorm),
}

impl Layer {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Layer::Dense(layer) => layer.forward(x).tanh(),
            Layer::Norm(layer) => layer.forward(x),
        }
    }
}

pub(super) fn enums(run: &Run) -> Result<Outcome> {
    let norm = || LayerNormConfig::new(6).init(&run.device);
    let model = vec![Layer::Dense(linear(run)), Layer::Norm(norm()), Layer::Dense(linear(run)), Layer::Norm(norm())];
    train(run, model, |model, x, choice| {
        model.iter().enumerate().filter(|(i, _)| *i != choice + 1).fold(x, |h, (_, layer)| layer.forward(h))
    })
}

#[derive(Module, Debug)]
struct Block {
    layers: Vec<Layer>,
    gate: Option<Linear>,
}

#[derive(Module, Debug)]
struct Tower {
    blocks: Vec<Block>,
    head: (Linear, Option<Layer>),
}

pub(super) fn nested(run: &Run) -> Result<Outcome> {
    let norm = || LayerNormConfig::new(6).init(&run.device);
    let block = |gated: bool| Block {
        layers: vec![Layer::Dense(linear(run)), Layer::Norm(norm())],
        gate: gated.then(|| linear(run)),
    };
    let model = Tower { blocks: vec![block(true), block(false), block(true)], head: (linear(run), None) };
    train(run, model, |model, x, choice| {
        let mut h = x;
        for (i, block) in model.blocks.iter().enumerate() {
            if i == choice {
                continue;
            }
            let y = block.layers.iter().fold(h.clone(), |h, layer| layer.forward(h));
            h = match &block.gate {
                Some(gate) => y * gate.forward(h).tanh(),
                None => y + h,
            };
        }
        model.head.0.forward(h)
    })
}

#[derive(Module, Debug)]
struct Fixed {
    pair: [Linear; 2],
    mixed: (Linear, LayerNorm, Linear),
    constant: usize,
}

pub(super) fn arrays_and_tuples(run: &Run) -> Result<Outcome> {
    let model = Fixed {
        pair: [linear(run), linear(run)],
        mixed: (linear(run), LayerNormConfig::new(6).init(&run.device), linear(run)),
        constant: 3,
    };
    train(run, model, |model, x, choice| {
        let h = model.pair[choice % 2].forward(x).tanh() * model.constant as f64;
        let h = model.mixed.1.forward(model.mixed.0.forward(h));
        if choice == 2 { h } else { model.mixed.2.forward(h) }
    })
}
