//! Residual networks: He et al. 2015, "Deep Residual Learning for Image Recognition", in torchvision's layout.

use burn::module::Module;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;

use super::conv_norm::{ConvNorm, Norm};
use super::train_pictures::Classifier;

/// Pictures with at least this many rows are made smaller before the first block, as ImageNet's are.
pub const LARGE: usize = 64;

/// Number of layers with weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Depth {
    /// 8 basic blocks.
    #[value(name = "18")]
    D18,
    /// 16 basic blocks.
    #[value(name = "34")]
    D34,
    /// 16 bottleneck blocks.
    #[value(name = "50")]
    D50,
}

impl Depth {
    /// Blocks of each of the four stages.
    fn blocks(self) -> [usize; 4] {
        match self {
            Self::D18 => [2, 2, 2, 2],
            Self::D34 | Self::D50 => [3, 4, 6, 3],
        }
    }

    /// Channels of a block's result, as a multiple of the channels of its inner layers.
    fn expansion(self) -> usize {
        match self {
            Self::D18 | Self::D34 => 1,
            Self::D50 => 4,
        }
    }
}

/// Configuration of the network.
#[derive(Debug, Clone)]
pub struct ResNetConfig {
    /// Number of layers with weights.
    pub depth: Depth,
    /// Number of classes.
    pub classes: usize,
    /// Rows and columns of a picture. From [`LARGE`] on, the first layers are a 7 × 7 convolution and a pool, both of
    /// stride 2; below, the first layer is a 3 × 3 convolution of stride 1.
    pub side: usize,
    /// Channels of the first stage, 64 in the paper; each stage has twice as many as the one before.
    pub width: usize,
    /// True to let blocks begin as the identity (Goyal et al. 2017, 5.1; torchvision's `zero_init_residual`).
    pub zero_init_residual: bool,
}

/// A residual network. Parameters have the same names with either normalisation, so a file that was saved with one
/// loads into the other.
#[derive(Module, Debug)]
pub struct ResNet<N: Module = BatchNorm> {
    stem: ConvNorm<N>,
    pool: Option<MaxPool2d>,
    blocks: Vec<Block<N>>,
    fc: Linear,
}

/// Layers whose result is added to their input.
#[derive(Module, Debug)]
pub struct Block<N: Module> {
    /// Two of 3 × 3, or the bottleneck's 1 × 1, 3 × 3, 1 × 1.
    layers: Vec<ConvNorm<N>>,
    /// Fits the input to the result, where they differ in shape.
    downsample: Option<ConvNorm<N>>,
}

impl ResNetConfig {
    /// A network with random weights from the device's generator; call `device.seed(…)` first to make them repeat.
    pub fn init<N: Norm>(&self, device: &Device) -> ResNet<N> {
        let large = self.side >= LARGE;
        let (kernel, stride) = if large { (7, 2) } else { (3, 1) };
        let pool =
            MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
        let mut blocks = Vec::new();
        let mut channels = self.width;
        for (stage, number) in self.depth.blocks().into_iter().enumerate() {
            for block in 0..number {
                // All stages but the first halve the picture, in their first block.
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(self.block(channels, self.width << stage, stride, device));
                channels = (self.width << stage) * self.depth.expansion();
            }
        }
        ResNet {
            stem: ConvNorm::new([3, self.width], kernel, stride, false, device),
            pool: large.then(|| pool.init()),
            blocks,
            fc: LinearConfig::new(channels, self.classes).init(device),
        }
    }

    fn block<N: Norm>(&self, channels: usize, inner: usize, stride: usize, device: &Device) -> Block<N> {
        let out = inner * self.depth.expansion();
        let conv = |channels, kernel, stride| ConvNorm::new(channels, kernel, stride, false, device);
        let last = |channels, kernel| ConvNorm::new(channels, kernel, 1, self.zero_init_residual, device);
        let layers = match self.depth {
            Depth::D18 | Depth::D34 => vec![conv([channels, inner], 3, stride), last([inner, out], 3)],
            // The stride is in the 3 × 3 convolution (version 1.5), as torchvision has it, and not in the paper's 1 ×
            // 1.
            Depth::D50 => vec![conv([channels, inner], 1, 1), conv([inner, inner], 3, stride), last([inner, out], 1)],
        };
        Block { layers, downsample: (stride != 1 || channels != out).then(|| conv([channels, out], 1, stride)) }
    }
}

impl<N: Norm> Block<N> {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let shortcut = match &self.downsample {
            Some(downsample) => downsample.forward(x.clone()),
            None => x.clone(),
        };
        let last = self.layers.len() - 1;
        let inner = self.layers[..last].iter().fold(x, |x, layer| relu(layer.forward(x)));
        relu(self.layers[last].forward(inner) + shortcut)
    }
}

impl<N: Norm> Classifier for ResNet<N> {
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = relu(self.stem.forward(images));
        if let Some(pool) = &self.pool {
            x = pool.forward(x);
        }
        x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        // The mean over the picture.
        self.fc.forward(x.flatten::<3>(2, 3).mean_dim(2).flatten(1, 2))
    }
}

#[cfg(test)]
mod tests {
    use burn::module::{ModuleVisitor, Param};
    use burn::tensor::Distribution;

    use super::*;

    fn config(depth: Depth, side: usize, width: usize) -> ResNetConfig {
        ResNetConfig { depth, classes: 1000, side, width, zero_init_residual: false }
    }

    /// Counts what is trained: running means and variances are visited, too.
    struct Trained(usize);

    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0 += param.lazy_shape().num_elements();
            }
        }
    }

    #[test]
    fn has_the_parameters_of_torchvisions_models() {
        for (depth, parameters) in [(Depth::D18, 11_689_512), (Depth::D34, 21_797_672), (Depth::D50, 25_557_032)] {
            let mut trained = Trained(0);
            config(depth, 224, 64).init::<BatchNorm>(&Device::flex().autodiff()).visit(&mut trained);
            assert_eq!(trained.0, parameters, "{depth:?}");
        }
    }

    #[test]
    fn small_and_large_pictures_of_any_size_pass() {
        for (depth, side) in [(Depth::D18, 16), (Depth::D34, 33), (Depth::D50, 32), (Depth::D18, 65), (Depth::D50, 64)]
        {
            let model = ResNetConfig { classes: 3, ..config(depth, side, 2) }.init::<BatchNorm>(&Device::flex());
            assert_eq!(model.pool.is_some(), side >= LARGE);
            let images = Tensor::random([2, 3, side, side], Distribution::Default, &Device::flex());
            let values: Vec<f32> = model.forward(images).into_data().iter().collect();
            assert_eq!(values.len(), 2 * 3, "{depth:?}, {side}");
            assert!(values.iter().all(|value| value.is_finite()), "{depth:?}, {side}: {values:?}");
        }
    }

    #[test]
    fn zeroed_blocks_are_the_identity_and_can_learn() {
        let device = Device::flex().autodiff();
        let model = ResNetConfig { zero_init_residual: true, classes: 3, ..config(Depth::D50, 16, 2) }
            .init::<BatchNorm>(&device);
        let x = Tensor::random([2, 8, 4, 4], Distribution::Uniform(0.0, 1.0), &device);
        let (first, second) = (&model.blocks[0], &model.blocks[1]);
        assert!(first.downsample.is_some() && second.downsample.is_none());
        second.forward(x.clone()).into_data().assert_eq(&x.clone().into_data(), true);

        let grads = model.blocks[1].forward(x).sum().backward();
        let mut gradients = Gradients { grads, nonzero: 0 };
        second.visit(&mut gradients);
        assert!(gradients.nonzero > 0);
    }

    struct Gradients {
        grads: burn::tensor::Gradients,
        nonzero: usize,
    }

    impl ModuleVisitor for Gradients {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let sum = param.base().grad(&self.grads).map(|grad| grad.abs().sum().into_scalar::<f32>());
            self.nonzero += usize::from(sum.is_some_and(|sum| sum > 0.0));
        }
    }
}
