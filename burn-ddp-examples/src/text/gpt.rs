//! A decoder-only transformer over bytes.
//!
//! Its blocks are those of GPT-2 (Radford et al. 2019): normalisation before attention and before the perceptron,
//! learned positions. Every byte is a token, so there is no tokenizer.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::prelude::*;

use crate::trainer::loss_and_accuracy::widened;

/// Values of a byte.
const BYTES: usize = 256;

/// Configuration of [`Gpt`].
#[derive(Config, Debug)]
pub struct GptConfig {
    /// Number of blocks.
    pub layers: usize,
    /// Size of an embedding; a multiple of `heads`.
    pub width: usize,
    /// Attention heads of a block.
    pub heads: usize,
    /// Longest sequence.
    pub context: usize,
    /// Probability with which activations are dropped while training.
    #[config(default = 0.0)]
    pub dropout: f64,
}

/// A transformer that predicts the next byte.
#[derive(Module, Debug)]
pub struct Gpt {
    bytes: Embedding,
    positions: Embedding,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    context: usize,
}

#[derive(Module, Debug)]
struct Block {
    norm1: LayerNorm,
    attention: MultiHeadAttention,
    norm2: LayerNorm,
    up: Linear,
    activation: Gelu,
    down: Linear,
    dropout: Dropout,
}

impl GptConfig {
    /// A model with random weights from the device's generator; call `ddp.seed(…)` first to make them repeat.
    pub fn init(&self, device: &Device) -> Gpt {
        let norm = || LayerNormConfig::new(self.width).init(device);
        let dropout = || DropoutConfig::new(self.dropout).init();
        let attention = MultiHeadAttentionConfig::new(self.width, self.heads).with_dropout(self.dropout);
        let block = |_| Block {
            norm1: norm(),
            attention: attention.init(device),
            norm2: norm(),
            up: LinearConfig::new(self.width, 4 * self.width).init(device),
            activation: Gelu::new(),
            down: LinearConfig::new(4 * self.width, self.width).init(device),
            dropout: dropout(),
        };
        Gpt {
            bytes: EmbeddingConfig::new(BYTES, self.width).init(device),
            positions: EmbeddingConfig::new(self.context, self.width).init(device),
            dropout: dropout(),
            blocks: (0..self.layers).map(block).collect(),
            norm: norm(),
            head: LinearConfig::new(self.width, BYTES).with_bias(false).init(device),
            context: self.context,
        }
    }
}

impl Block {
    /// `[windows, len, width]` → the same shape.
    fn forward(&self, x: Tensor<3>, mask: Tensor<3, Bool>) -> Tensor<3> {
        let input = MhaInput::self_attn(self.norm1.forward(x.clone())).mask_attn(mask);
        let x = x + self.dropout.forward(self.attention.forward(input).context);
        let inner = self.activation.forward(self.up.forward(self.norm2.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(inner))
    }
}

impl Gpt {
    /// Bytes `[windows, len]` → `[windows, len, 256]`, unnormalised log-probabilities of the byte after each of them.
    /// `len` is at most the context.
    pub fn forward(&self, bytes: Tensor<2, Int>) -> Tensor<3> {
        let ([windows, len], device) = (bytes.dims(), bytes.device());
        let positions = Tensor::<1, Int>::arange(0..len as i64, &device).unsqueeze::<2>();
        let mut x = self.bytes.forward(bytes) + self.positions.forward(positions);
        x = self.dropout.forward(x);
        let mask = generate_autoregressive_mask(windows, len, &device);
        for block in &self.blocks {
            x = block.forward(x, mask.clone());
        }
        self.head.forward(self.norm.forward(x))
    }

    /// Mean cross-entropy of the bytes `next` `[windows, len]` after `bytes` `[windows, len]`, in nats per byte, `[1]`.
    pub fn loss(&self, bytes: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
        let ([windows, len], device) = (next.dims(), next.device());
        let logits = widened(self.forward(bytes).reshape([windows * len, BYTES]));
        CrossEntropyLossConfig::new().init(&device).forward(logits, next.reshape([windows * len]))
    }

    /// Generates `len` bytes after `prompt`, which has at least one. Where `draw` returns `None`, the next byte is the
    /// most probable one; where it returns a number in `[0, 1)`, the number samples a byte by the model's
    /// probabilities.
    pub fn generate(
        &self,
        prompt: &[u8],
        len: usize,
        device: &Device,
        mut draw: impl FnMut() -> Option<f64>,
    ) -> Vec<u8> {
        let mut text = prompt.to_vec();
        for _ in 0..len {
            let seen: Vec<i32> =
                text[text.len().saturating_sub(self.context)..].iter().map(|byte| i32::from(*byte)).collect();
            let count = seen.len();
            let bytes = Tensor::<2, Int>::from_data(TensorData::new(seen, [1, count]), device);
            let last = self.forward(bytes).slice([0..1, count - 1..count, 0..BYTES]).reshape([BYTES]);
            let scores: Vec<f64> = last.into_data().iter::<f64>().collect();
            text.push(choose(&scores, draw()));
        }
        text.split_off(prompt.len())
    }
}

/// The byte with the highest score, or, if `drawn` is a number in `[0, 1)`, the byte that it samples from the softmax
/// of the scores.
fn choose(scores: &[f64], drawn: Option<f64>) -> u8 {
    let (best, top) = scores.iter().copied().enumerate().fold((0, f64::MIN), |a, b| if b.1 > a.1 { b } else { a });
    let Some(drawn) = drawn else { return best as u8 };
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let mut left = drawn * weights.iter().sum::<f64>();
    for (byte, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return byte as u8;
        }
    }
    best as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(device: &Device) -> Gpt {
        GptConfig::new(2, 16, 2, 8).init(device)
    }

    #[test]
    fn has_the_parameters_of_its_blocks() {
        let block = 12 * 16 * 16 + 13 * 16; // 4 + 8 matrices of width², their biases, two normalisations
        assert_eq!(small(&Device::flex()).num_params(), (256 + 8 + 2 + 256) * 16 + 2 * block);
    }

    #[test]
    fn a_prediction_depends_on_nothing_that_comes_after_it() {
        let device = Device::flex();
        let model = small(&device);
        let logits = |bytes: [i32; 4]| {
            let all = model.forward(Tensor::<2, Int>::from_data([bytes], &device));
            all.slice([0..1, 0..3, 0..256]).into_data().try_to_vec::<f32>().unwrap()
        };
        assert_eq!(logits([1, 2, 3, 4]), logits([1, 2, 3, 250]));
        assert_ne!(logits([1, 2, 3, 4]), logits([9, 2, 3, 4]));
    }

    #[test]
    fn it_learns_a_text_by_heart_and_repeats_it() {
        use burn::optim::{AdamConfig, GradientsParams};
        let device = Device::flex().autodiff();
        device.seed(1);
        let (mut model, mut optim) = (small(&device), AdamConfig::new().init());
        let text: Vec<i32> = b"abcadeabc".map(i32::from).to_vec();
        let all = Tensor::<2, Int>::from_data(TensorData::new(text, [1, 9]), &device);
        let (bytes, next) = (all.clone().slice([0..1, 0..8]), all.slice([0..1, 1..9]));
        for _ in 0..150 {
            let grads = GradientsParams::from_grads(model.loss(bytes.clone(), next.clone()).backward(), &model);
            model = optim.step(0.01, model, grads);
        }
        assert!(model.loss(bytes, next).into_scalar::<f64>() < 0.05);
        // Different bytes follow the two `a`: attention, and not only the byte before, decides.
        assert_eq!(model.valid().generate(b"a", 8, &Device::flex(), || None), b"bcadeabc");
    }

    #[test]
    fn bytes_are_drawn_by_their_probabilities() {
        let scores = [0.0, f64::NEG_INFINITY, (3.0_f64).ln()];
        assert_eq!(choose(&scores, None), 2);
        assert_eq!([0.0, 0.24, 0.26, 0.99].map(|drawn| choose(&scores, Some(drawn))), [0, 0, 2, 2]);
    }
}
