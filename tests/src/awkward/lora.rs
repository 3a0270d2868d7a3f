//! Adapters on frozen weights.

use anyhow::Result;
use burn::module::{Lora, Module, QLora, Quantizer};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::DType;
use burn::tensor::quantization::{Calibration, QuantScheme};

use super::{Outcome, Run, adam};

fn base(run: &Run, widths: [usize; 3]) -> Vec<Linear> {
    let inputs = [6, widths[0], widths[1]];
    let layer = |(input, output)| LinearConfig::new(input, output).init(&run.device);
    run.fill(inputs.into_iter().zip(widths).map(layer).collect::<Vec<_>>())
}

fn train(run: &Run, model: Vec<Linear>, used: impl Fn(usize, usize, usize) -> bool) -> Result<Outcome> {
    let mut model = run.wrap(model)?;
    let mut optim = adam();
    for step in 0..5 {
        let loss = run.over_parts(|part| {
            let mut h = run.x(step, part);
            for (i, layer) in model.iter().enumerate() {
                if used(step, part, i) {
                    h = layer.forward(h).tanh();
                }
            }
            h.powf_scalar(2.0).sum()
        });
        model = run.step(&mut optim, model, loss)?;
    }
    run.outcome(&model)
}

/// LoRA first, then `wrap`: the factors are ordinary parameters of the wrapped model.
pub(super) fn adapters(run: &Run) -> Result<Outcome> {
    let model = run.fill(base(run, [6; 3]).apply_lora(Lora::new(2, 4.0)));
    train(run, model, |_, _, _| true)
}

pub(super) fn adapters_unused_on_some_ranks(run: &Run) -> Result<Outcome> {
    let model = run.fill(base(run, [6; 3]).apply_lora(Lora::new(2, 4.0)));
    train(run, model, |step, part, layer| layer == 0 || (part / 2 + step) % 2 == layer % 2)
}

/// QLoRA: the base is packed in 8 bits. CubeCL packs four numbers of a row into one.
pub(super) fn quantized_base(run: &Run) -> Result<Outcome> {
    let run = run.with_dtype(DType::F32);
    let quantizer = Quantizer::new(Calibration::MinMax, QuantScheme::default());
    let model = base(&run, [8; 3]).apply_qlora(QLora::new(Lora::new(2, 4.0), quantizer));
    let model = run.fill_as(model, None);
    Ok(train(&run, model, |_, _, _| true)?.within(1e-4))
}
