//! Models, data and small tools that the system tests and the program `rank` share.
#![forbid(unsafe_code)]

pub mod awkward;
pub mod four_models;
pub mod job;
pub mod split_training;

use burn::module::{ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_ddp::prelude::*;

/// Gives trainable parameters values that depend only on their place in the model and on this number. With a different
/// number on each rank, the values are equal only once `wrap` has made them so.
pub struct Fill(pub f32);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1.0;
        param.map(|old| match old.is_require_grad() {
            true => {
                let (dims, device) = (old.dims(), old.device());
                let ramp = Tensor::<1, Int>::arange(0..dims.iter().product::<usize>() as i64, &device).float();
                (ramp * 0.7 + self.0).sin().reshape(dims).detach().require_grad()
            }
            false => old,
        })
    }
}

/// Three layers, so that buckets have an order.
#[derive(Module, Debug)]
pub struct Mlp {
    /// First.
    pub a: Linear,
    /// Second.
    pub b: Linear,
    /// Third.
    pub c: Linear,
}

impl Mlp {
    /// 6 → 16 → 16 → 3.
    pub fn new(device: &Device) -> Self {
        let init = |i, o| LinearConfig::new(i, o).init(device);
        Mlp { a: init(6, 16), b: init(16, 16), c: init(16, 3) }
    }

    /// `[n, 6]` → `[n, 3]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.c.forward(self.b.forward(self.a.forward(x).tanh()).tanh())
    }

    /// Mean squared error over the items of the batch.
    pub fn loss(&self, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
        (self.forward(x) - y).powf_scalar(2.0).mean()
    }
}

/// A model with running statistics.
#[derive(Module, Debug)]
pub struct Normed {
    /// First.
    pub a: Linear,
    /// Normalises the output of the first.
    pub norm: BatchNorm,
    /// Second.
    pub b: Linear,
}

impl Normed {
    /// 6 → 4 → 3.
    pub fn new(device: &Device) -> Self {
        let init = |i, o| LinearConfig::new(i, o).init(device);
        Normed { a: init(6, 4), norm: BatchNormConfig::new(4).init(device), b: init(4, 3) }
    }

    /// Mean square of the output for `[n, 6]`.
    pub fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.b.forward(self.norm.forward(self.a.forward(x))).powf_scalar(2.0).mean()
    }

    /// Running mean and variance, the last forward included.
    pub fn statistics(&self) -> [Vec<f64>; 2] {
        let model = self.valid();
        [model.norm.running_mean.value(), model.norm.running_var.value()]
            .map(|t| t.into_data().convert::<f64>().try_to_vec().expect("was just converted"))
    }
}

/// The same module with every float parameter in f64.
pub fn to_f64<M: Module>(model: M) -> M {
    struct Cast;
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|t| {
                let grad = t.is_require_grad();
                let t = Tensor::from_inner(t.inner().cast(DType::F64));
                if grad { t.require_grad() } else { t }
            })
        }
    }
    model.map(&mut Cast)
}

/// Rows `start .. start + rows` of an endless table of numbers in −1 … 1.
pub fn rows(start: usize, rows: usize, columns: usize, salt: u64, dtype: DType, device: &Device) -> Tensor<2> {
    let values: Vec<f64> = (start * columns..(start + rows) * columns).map(|i| number(i, salt)).collect();
    Tensor::from_data(TensorData::new(values, [rows, columns]).convert_dtype(dtype), (device, dtype))
}

/// The `i`-th number of an endless sequence in −1 … 1; each salt has its own sequence.
pub fn number(i: usize, salt: u64) -> f64 {
    let mut z = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ salt.wrapping_mul(0xD1B5_4A32_D192_ED03);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z >> 11) as f64 / (1u64 << 53) as f64) * 2.0 - 1.0
}

/// The device that ranks of this process compute on: `BURN_DEVICE` chooses its kind.
pub fn device() -> Device {
    Ddp::spawn(1, |ddp| Ok(ddp.device()?)).expect("a device").remove(0)
}

/// The widest floats that the device computes with.
pub fn widest(device: &Device) -> DType {
    if device.supports_dtype(DType::F64) { DType::F64 } else { DType::F32 }
}

/// True if gradients are read from the device at the end of backward, so that no bucket is under way before.
pub fn reads_at_the_end() -> bool {
    // NCCL reduces gradients on their device.
    is_set("BURN_DEVICE", &["wgpu", "vulkan", "metal", "webgpu", "cuda", "rocm"]) && !reduces_by_nccl()
}

/// `tolerance` for numbers that are compared with those of another device, or of other batches. On CUDA Burn rounds the
/// operands of f32 matrix products to TF32 (11 bits; 3e-4 seen on an H200 where 1e-5 is allowed).
pub fn tolerance_of_device(tolerance: f64) -> f64 {
    if is_gpu() { 500.0 * tolerance } else { tolerance }
}

/// True if models are on a GPU, where Burn fuses operations. If ranks are threads that share one, their operations are
/// fused in other ways, and rounded in others.
pub fn is_gpu() -> bool {
    is_set("BURN_DEVICE", &["cuda", "rocm"])
}

/// True if NCCL reduces gradients: the order of its additions depends on the size of a bucket.
pub fn reduces_by_nccl() -> bool {
    is_set("BURN_DDP_ENGINE", &["nccl"])
}

fn is_set(name: &str, values: &[&str]) -> bool {
    std::env::var(name).is_ok_and(|value| values.contains(&value.as_str()))
}

/// Optimizers of the tests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optim {
    /// With momentum.
    Sgd,
    /// With Burn's defaults.
    Adam,
}

/// Wraps `model` and trains it for `steps` steps on `global_batch` rows each, this rank's part of them.
pub fn train(
    ddp: &Ddp,
    model: Mlp,
    optim: Optim,
    steps: usize,
    global_batch: usize,
    config: &WrapConfig,
) -> anyhow::Result<Mlp> {
    let device = ddp.device()?.autodiff();
    let dtype = model.a.weight.base().dtype();
    let mut model = ddp.wrap_with(model, config)?;
    let mut sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let mut adam = AdamConfig::new().init();
    let batch = global_batch / ddp.world_size();
    for step in 0..steps {
        let start = step * global_batch + ddp.rank() * batch;
        let x = rows(start, batch, 6, 1, dtype, &device);
        let y = rows(start, batch, 3, 2, dtype, &device);
        let grads = ddp.backward(&model.loss(x, y), &model)?.expect("averages");
        model = match optim {
            Optim::Sgd => sgd.step(0.05, model, grads),
            Optim::Adam => adam.step(1e-3, model, grads),
        };
    }
    Ok(model)
}

/// All values of a model, parameter after parameter, without quantized ones.
pub fn values<M: Module>(model: &M) -> Vec<Vec<f64>> {
    struct Read(Vec<Vec<f64>>);
    impl burn::module::ModuleVisitor for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.base().dtype().is_float() {
                self.0.push(param.base().into_data().convert::<f64>().try_to_vec().unwrap());
            }
        }
    }
    let mut read = Read(Vec::new());
    model.visit(&mut read);
    read.0
}

/// Largest ‖a − b‖ / ‖b‖ over parameters.
pub fn distance(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    a.iter()
        .zip(b)
        .map(|(a, b)| norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied()).max(1e-300))
        .fold(0.0, f64::max)
}
