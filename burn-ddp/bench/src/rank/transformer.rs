//! A decoder-only transformer: a small model with the layers of models that need sharding.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;

/// Number of tokens: one for each byte.
const TOKENS: usize = 256;
/// Elements of an embedding. A block has the weights of 12 matrices of WIDTH × WIDTH: 3 MiB.
const WIDTH: usize = 256;
const HEADS: usize = 4;
/// Tokens of an item.
const CONTEXT: usize = 64;

#[derive(Module, Debug)]
pub(super) struct Transformer {
    tokens: Embedding,
    blocks: Vec<Block>,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    norm1: LayerNorm,
    attention: MultiHeadAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Transformer {
    /// A model of at least `bytes` of f32.
    pub(super) fn new(bytes: usize, device: &Device) -> Transformer {
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        let block = |_| Block {
            norm1: norm(),
            attention: MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0).init(device),
            norm2: norm(),
            up: LinearConfig::new(WIDTH, 4 * WIDTH).init(device),
            down: LinearConfig::new(4 * WIDTH, WIDTH).init(device),
        };
        Transformer {
            tokens: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            blocks: (0..bytes.div_ceil(4 * 12 * WIDTH * WIDTH)).map(block).collect(),
            head: LinearConfig::new(WIDTH, TOKENS).with_bias(false).init(device),
        }
    }

    /// Mean loss of `items` items of rank `rank`.
    pub(super) fn loss(&self, items: usize, rank: usize, device: &Device) -> Tensor<1> {
        let value = |i: usize| ((i * 31 + rank) % TOKENS) as i32;
        let values: Vec<i32> = (0..items * CONTEXT).map(value).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(values, [items, CONTEXT]), device);
        let mask = generate_autoregressive_mask(items, CONTEXT, device);
        let mut x = self.tokens.forward(tokens.clone());
        for Block { norm1, attention, norm2, up, down } in &self.blocks {
            let input = MhaInput::self_attn(norm1.forward(x.clone())).mask_attn(mask.clone());
            x = x + attention.forward(input).context;
            x = x.clone() + down.forward(Gelu::new().forward(up.forward(norm2.forward(x))));
        }
        let logits = self.head.forward(x).reshape([items * CONTEXT, TOKENS]);
        CrossEntropyLossConfig::new().init(device).forward(logits, tokens.reshape([items * CONTEXT]))
    }
}
