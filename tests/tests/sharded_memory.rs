//! Memory of sharded training, counted by the allocator. The counters belong to the process, so there is only one test.

mod counting_allocator;

use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_ddp::MemoryUse;
use burn_ddp::prelude::*;
use counting_allocator::Counting;

/// Bytes that are allocated now.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Size of a part of a weight, and the number of blocks of this size that are allocated now.
static PART_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
static PARTS: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    /// Blocks of the size of a whole weight that this thread, a rank, holds now.
    static WHOLE: Cell<isize> = const { Cell::new(0) };
    /// The most of these blocks that the thread has held at once.
    static MOST_WHOLE: Cell<isize> = const { Cell::new(0) };
}

/// Side of a layer; divisible by all numbers of ranks.
const WIDTH: usize = 240;
const WEIGHT_BYTES: usize = 4 * WIDTH * WIDTH;

fn appears(bytes: usize) {
    LIVE.fetch_add(bytes, Ordering::Relaxed);
    if bytes == PART_BYTES.load(Ordering::Relaxed) {
        PARTS.fetch_add(1, Ordering::Relaxed);
    }
    if bytes == WEIGHT_BYTES {
        let now = WHOLE.get() + 1;
        WHOLE.set(now);
        MOST_WHOLE.set(MOST_WHOLE.get().max(now));
    }
}

fn goes(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
    if bytes == PART_BYTES.load(Ordering::Relaxed) {
        PARTS.fetch_sub(1, Ordering::Relaxed);
    }
    if bytes == WEIGHT_BYTES {
        WHOLE.set(WHOLE.get() - 1);
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting { appears, goes };

#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

impl Stack {
    fn new(layers: usize, device: &Device) -> Stack {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        Stack { layers: (0..layers).map(layer).collect() }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x).tanh()).powf_scalar(2.0).mean()
    }
}

/// Memory of a rank, as the mean of all ranks.
#[derive(Clone, Copy, Debug)]
struct Held {
    bytes: f64,
    /// Blocks of the size of a part.
    parts: f64,
}

/// Memory of one rank in a step.
#[derive(Debug)]
struct Memory {
    estimate: MemoryUse,
    with_gradients: Held,
    after_step: Held,
    /// Blocks of the size of a weight.
    kept_by_forward: isize,
    most_in_forward: isize,
    most_in_backward: isize,
    most_in_step: isize,
}

/// The third step of each rank of a sharded model.
fn memory(world: usize, layers: usize) -> Vec<Memory> {
    let config = WrapConfig::new().with_sharding(Sharding::Parameters);
    PART_BYTES.store(WEIGHT_BYTES / world, Ordering::Relaxed);
    let ranks = Ddp::spawn(world, |ddp| {
        let device = ddp.device()?.autodiff();
        // The barriers stop the other ranks while the counters are read.
        let held = || -> burn_ddp::Result<Held> {
            ddp.barrier()?;
            let (bytes, parts) = (LIVE.load(Ordering::Relaxed) as f64, PARTS.load(Ordering::Relaxed) as f64);
            ddp.barrier()?;
            Ok(Held { bytes: bytes / world as f64, parts: parts / world as f64 })
        };
        let most = || MOST_WHOLE.replace(WHOLE.get());
        let x = Tensor::<2>::ones([3, WIDTH], &device) * (1 + ddp.rank()) as f32;
        // The first matrix products allocate buffers that their threads keep.
        let plain = Stack::new(layers, &device);
        drop(GradientsParams::from_grads(plain.loss(x.clone()).backward(), &plain));
        drop(plain);
        let before = held()?;
        let since = || -> burn_ddp::Result<Held> {
            let Held { bytes, parts } = held()?;
            Ok(Held { bytes: bytes - before.bytes, parts: parts - before.parts })
        };
        let optim = AdamConfig::new().init();
        let model = Stack::new(layers, &device);
        let estimate = MemoryUse::estimate(&model, &config, world)?.with_optimizer(&optim)?;
        let mut model = ddp.wrap_with(model, &config)?;
        // All parts are as large as rank 0's.
        assert_eq!(ddp.telemetry().memory().with_optimizer(&optim)?, estimate);
        let mut optim = ddp.optimizer(optim, &model)?;
        let mut memory = None;
        for _ in 0..3 {
            // This thread may have freed blocks of other threads, which its count must not include.
            WHOLE.set(0);
            most();
            let loss = model.loss(x.clone());
            let (kept_by_forward, most_in_forward) = (WHOLE.get(), most());
            let grads = ddp.backward(&loss, &model)?.expect("averages");
            drop(loss);
            let most_in_backward = most();
            let with_gradients = since()?;
            model = optim.step(0.01, model, grads);
            let (after_step, most_in_step) = (since()?, most());
            memory = Some(Memory {
                estimate,
                with_gradients,
                after_step,
                kept_by_forward,
                most_in_forward,
                most_in_backward,
                most_in_step,
            });
        }
        Ok(memory)
    });
    ranks.unwrap().into_iter().flatten().collect()
}

#[test]
fn sharded_ranks_hold_their_parts_and_few_whole_layers() {
    // Parameters, two moments of Adam, and gradients until the step.
    let layers = 24;
    for world in 1..=4 {
        for rank in memory(world, layers) {
            for (held, tensors) in [(rank.with_gradients, 4), (rank.after_step, 3)] {
                let parts = (tensors * layers) as f64;
                // Up to 3 are buffers of the collectives.
                assert!((parts..parts + 3.1).contains(&held.parts), "{world} ranks: {held:?} of {parts} parts");
                let beyond = held.bytes - parts * (WEIGHT_BYTES / world) as f64;
                let engine = 3.0 * WEIGHT_BYTES as f64;
                assert!(beyond < engine + 512e3, "{world} ranks: {held:?}, {beyond} bytes beyond the parts");
                let MemoryUse { parameters, gradients, optimizer, engine_buffers, .. } = rank.estimate;
                let without = if tensors == 4 { 0 } else { gradients };
                let estimate = (parameters + gradients + optimizer.unwrap_or(0) - without) as f64;
                assert_eq!(estimate, parts * (WEIGHT_BYTES / world) as f64, "{world} ranks: {:?}", rank.estimate);
                assert!(engine_buffers as f64 <= engine, "{world} ranks: {:?}", rank.estimate);
            }
        }
    }
    // In forward the weight of the layer that computes; in backward also its gradient, and the copy that is reduced.
    let most = 2;
    for layers in [32, 100] {
        for rank in memory(2, layers) {
            let Memory { kept_by_forward, most_in_forward, most_in_backward, most_in_step, .. } = rank;
            assert!(kept_by_forward <= 0 && most_in_forward <= 1 && most_in_step <= 0, "{layers} layers: {rank:?}");
            assert!(most_in_backward <= most, "{layers} layers: {rank:?}");
            assert_eq!(rank.estimate.gathered, (most as usize * WEIGHT_BYTES) as u64, "{layers} layers");
        }
    }
}
