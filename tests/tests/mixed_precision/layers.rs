//! Layers of Burn in half precision: the table of `docs/models.md`, a test for each row.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, Gru,
    GruConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PRelu, PReluConfig,
    PositionalEncodingConfig, RmsNorm, RmsNormConfig, RotaryEncodingConfig, SwiGlu, SwiGluConfig,
};
use burn::prelude::*;
use burn::tensor::{DType, Distribution};
use burn_ddp::nn::SyncBatchNorm;
use burn_ddp::prelude::*;

use super::{HALVES, in_half, small_scale};

/// One layer of each kind.
#[derive(Module, Debug)]
struct Layers {
    linear: Linear,
    conv: Conv2d,
    embedding: Embedding,
    layer_norm: LayerNorm,
    rms_norm: RmsNorm,
    group_norm: GroupNorm,
    prelu: PRelu,
    swiglu: SwiGlu,
    attention: MultiHeadAttention,
    dropout: Dropout,
    batch_norm: BatchNorm,
    sync_batch_norm: SyncBatchNorm,
    lstm: Lstm,
    gru: Gru,
}

impl Layers {
    fn new(device: &Device) -> Self {
        Layers {
            linear: LinearConfig::new(8, 8).init(device),
            conv: Conv2dConfig::new([2, 4], [3, 3]).init(device),
            embedding: EmbeddingConfig::new(5, 8).init(device),
            layer_norm: LayerNormConfig::new(8).init(device),
            rms_norm: RmsNormConfig::new(8).init(device),
            group_norm: GroupNormConfig::new(2, 8).init(device),
            prelu: PReluConfig::new().init(device),
            swiglu: SwiGluConfig::new(8, 8).init(device),
            attention: MultiHeadAttentionConfig::new(8, 2).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            batch_norm: BatchNormConfig::new(8).init(device),
            sync_batch_norm: BatchNormConfig::new(8).init(device).into(),
            lstm: LstmConfig::new(8, 8, true).init(device),
            gru: GruConfig::new(8, 8, true).init(device),
        }
    }
}

/// Runs `forward` of a model that computes in each half, with these layers in full precision, and its backward. The
/// output must be a half.
fn works(world: usize, full: &[&str], forward: impl Fn(&Layers, DType, &Device) -> Tensor<2> + Sync) {
    for precision in HALVES {
        Ddp::spawn(world, |ddp| {
            let device = ddp.device()?.autodiff();
            let dtype = DType::from(precision.dtype());
            let config = in_half(precision).with_loss_scaling(small_scale()).with_full_precision(full.to_vec());
            let model = ddp.wrap_with(Layers::new(&device), &config)?;
            let out = forward(&model, dtype, &device);
            assert_eq!(out.dtype(), dtype);
            let loss = out.cast(DType::F32).powf_scalar(2.0).mean();
            assert!(ddp.backward(&loss, &model)?.is_some_and(|grads| !grads.is_empty()));
            let valid = forward(&model.valid(), dtype, &device.without_autodiff());
            assert_eq!(valid.dtype(), dtype);
            Ok(())
        })
        .unwrap();
    }
}

/// `forward` panics in half precision: on Flex, which looks at types.
fn mixes_types<const D: usize>(forward: impl Fn(&Layers, DType, &Device) -> Tensor<D> + Sync) {
    for precision in HALVES {
        Ddp::spawn(1, |ddp| {
            let device = ddp.device()?.autodiff();
            let model = ddp.wrap_with(Layers::new(&device), &in_half(precision))?;
            let dtype = DType::from(precision.dtype());
            assert!(catch_unwind(AssertUnwindSafe(|| forward(&model, dtype, &device).into_data())).is_err());
            Ok(())
        })
        .unwrap();
    }
}

fn input(dtype: DType, device: &Device) -> Tensor<2> {
    Tensor::<2>::random([6, 8], Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

fn sequence(dtype: DType, device: &Device) -> Tensor<3> {
    input(dtype, device).reshape([2, 3, 8])
}

fn flat(x: Tensor<3>) -> Tensor<2> {
    x.flatten(0, 1)
}

/// What goes through a layer in f32 and comes back.
fn wide<const D: usize>(x: Tensor<D>, layer: impl Fn(Tensor<D>) -> Tensor<D>) -> Tensor<D> {
    let dtype = x.dtype();
    layer(x.cast(DType::F32)).cast(dtype)
}

#[test]
fn layers_that_need_nothing() {
    works(1, &[], |m, dtype, device| m.linear.forward(input(dtype, device)));
    works(1, &[], |m, dtype, device| {
        let x = Tensor::<4>::ones([2, 2, 5, 5], device).cast(dtype);
        m.conv.forward(x).reshape([2, -1])
    });
    works(1, &[], |m, _, device| flat(m.embedding.forward(Tensor::from_ints([[0, 3], [4, 4]], device))));
    works(1, &[], |m, dtype, device| m.layer_norm.forward(input(dtype, device)));
    works(1, &[], |m, dtype, device| m.rms_norm.forward(input(dtype, device)));
    works(1, &[], |m, dtype, device| m.group_norm.forward(input(dtype, device)));
    works(1, &[], |m, dtype, device| m.prelu.forward(input(dtype, device)));
    works(1, &[], |m, dtype, device| m.swiglu.forward(input(dtype, device)));
    works(1, &[], |m, dtype, device| m.linear.forward(m.dropout.forward(input(dtype, device))));
    works(1, &[], |m, dtype, device| {
        let mask = generate_autoregressive_mask(2, 3, device);
        flat(m.attention.forward(MhaInput::self_attn(sequence(dtype, device)).mask_attn(mask)).context)
    });
}

#[test]
fn batch_norm_needs_full_precision_and_two_casts() {
    mixes_types(|m, dtype, device| m.batch_norm.forward(input(dtype, device)));
    works(2, &["batch_norm"], |m, dtype, device| wide(input(dtype, device), |x| m.batch_norm.forward(x)));
}

#[test]
fn sync_batch_norm_needs_nothing() {
    for world in [1, 2] {
        works(world, &[], |m, dtype, device| m.sync_batch_norm.forward(input(dtype, device)));
        works(world, &["sync_batch_norm"], |m, dtype, device| m.sync_batch_norm.forward(input(dtype, device)));
    }
}

#[test]
fn a_norm_in_full_precision_needs_two_casts() {
    works(1, &["layer_norm"], |m, dtype, device| wide(input(dtype, device), |x| m.layer_norm.forward(x)));
}

#[test]
fn recurrent_layers_need_full_precision_and_two_casts() {
    mixes_types(|m, dtype, device| m.lstm.forward(sequence(dtype, device), None).0);
    mixes_types(|m, dtype, device| m.gru.forward(sequence(dtype, device), None));
    works(1, &["lstm"], |m, dtype, device| flat(wide(sequence(dtype, device), |x| m.lstm.forward(x, None).0)));
    works(1, &["gru"], |m, dtype, device| flat(wide(sequence(dtype, device), |x| m.gru.forward(x, None))));
}

#[test]
fn positions_need_two_casts() {
    let rotary = |device: &Device| RotaryEncodingConfig::new(3, 8).init(device);
    let positions = |device: &Device| PositionalEncodingConfig::new(8).init(device);
    mixes_types(|_, dtype, device| rotary(device).forward(sequence(dtype, device)));
    mixes_types(|_, dtype, device| positions(device).forward(sequence(dtype, device)));
    works(1, &[], |m, dtype, device| {
        let x = wide(sequence(dtype, device), |x| positions(device).forward(rotary(device).forward(x)));
        m.linear.forward(flat(x))
    });
}

#[test]
fn losses_need_one_cast() {
    let classes = |device: &Device| Tensor::<1, Int>::from_ints([0, 1, 2, 3, 4, 5], device);
    let smooth = |device: &Device| CrossEntropyLossConfig::new().with_smoothing(Some(0.1)).init(device);
    mixes_types(move |m, dtype, device| {
        smooth(device).forward(m.linear.forward(input(dtype, device)), classes(device))
    });
    mixes_types(|m, dtype, device| m.linear.forward(input(dtype, device)) - Tensor::ones([6, 8], device));
    works(1, &[], move |m, dtype, device| {
        let logits = m.linear.forward(input(dtype, device)).cast(DType::F32);
        let loss =
            smooth(device).forward(logits.clone(), classes(device)) + (logits - Tensor::ones([6, 8], device)).mean();
        loss.reshape([1, 1]).cast(dtype)
    });
}
