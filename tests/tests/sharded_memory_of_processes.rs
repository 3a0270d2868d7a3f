//! Memory of sharded training with ranks as processes over shared memory: what each rank has allocated, its share of
//! the segments, and what the system counts for it. `sharded_memory` counts single tensors of ranks that are threads.
//!
//! `cargo test --test sharded_memory_of_processes -- --nocapture` prints the figures. The test starts its own program
//! anew for each rank.
#![cfg(target_os = "linux")]

mod bytes_in_use;

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use burn::optim::AdamConfig;
use burn::prelude::*;
use burn_ddp::comm::EngineChoice;
use burn_ddp::prelude::*;
use burn_ddp::{MemoryUse, WorldOptions};
use burn_ddp_examples::text::gpt::GptConfig;
use burn_ddp_tests::job;
use bytes_in_use::{LIVE, PEAK};
use serde::{Deserialize, Serialize};

const MIB: f64 = (1 << 20) as f64;

/// Layers and width of a `gpt` of 49 MiB.
const LAYERS: usize = 4;
const WIDTH: usize = 512;
/// Its largest parameters, those of the perceptrons.
const LARGEST_BYTES: f64 = (4 * 4 * WIDTH * WIDTH) as f64;

/// Bytes of one rank.
#[derive(Debug, Serialize, Deserialize)]
struct Memory {
    /// Bytes of the whole model's parameters.
    whole_parameters: usize,
    /// Estimates for the rank.
    parameters: u64,
    gradients: u64,
    optimizer: u64,
    /// Allocated beyond what was before the model: after a backward, after the optimizer's step, and at most in a step.
    with_gradients: usize,
    after_step: usize,
    peak: usize,
    /// All segments that the rank maps.
    segments: usize,
    /// Proportional set sizes after a backward and after the optimizer's step.
    pss_with_gradients: usize,
    pss_after_step: usize,
}

/// The bytes behind `key` in an entry of `/proc/self/smaps` or `smaps_rollup`.
fn bytes_of(line: &str, key: &str) -> Option<usize> {
    let kib: usize = line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

fn pss() -> usize {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    rollup.lines().find_map(|line| bytes_of(line, "Pss:")).unwrap()
}

/// Bytes of the segments that this process maps. All their pages are present.
fn segments() -> usize {
    let mut by_inode = BTreeMap::new();
    let mut inode = None;
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        if let Some(bytes) = bytes_of(line, "Size:") {
            if let Some(inode) = inode.take() {
                *by_inode.entry(inode).or_insert(0) += bytes;
            }
        } else if line.contains("memfd:burn-ddp") {
            inode = line.split_whitespace().nth(4).map(ToOwned::to_owned);
        }
    }
    by_inode.values().sum()
}

/// The third step.
fn measure(ddp: &Ddp) -> anyhow::Result<Memory> {
    let device = ddp.device()?.autodiff().gradient_checkpointing();
    let symbols = Tensor::<1, Int>::arange(0..32, &device).add_scalar(ddp.rank() as i32).reshape([2, 16]);
    // The first matrix products allocate buffers that their threads keep.
    let small = GptConfig::new(1, WIDTH, 8, 16).init(&device);
    drop(small.loss(symbols.clone(), symbols.clone()).backward());
    drop(small);
    let before = LIVE.load(Relaxed);
    let since = |bytes: usize| bytes.saturating_sub(before);

    let config = WrapConfig::new().with_sharding(Sharding::Parameters);
    let optim = AdamConfig::new().init();
    let model = GptConfig::new(LAYERS, WIDTH, 8, 16).init(&device);
    let whole_parameters = 4 * model.num_params();
    let estimate = MemoryUse::estimate(&model, &config, ddp.world_size())?.with_optimizer(&optim)?;
    let mut model = ddp.wrap_with(model, &config)?;
    let mut optim = ddp.optimizer(optim, &model)?;
    let mut memory = None;
    for _ in 0..3 {
        PEAK.store(0, Relaxed);
        let loss = model.loss(symbols.clone(), symbols.clone());
        let grads = ddp.backward(&loss, &model)?.expect("averages");
        drop(loss);
        // The barriers stop the other ranks, whose mappings count in the PSS.
        ddp.barrier()?;
        let (with_gradients, pss_with_gradients) = (since(LIVE.load(Relaxed)), pss());
        ddp.barrier()?;
        model = optim.step(0.001, model, grads);
        ddp.barrier()?;
        memory = Some(Memory {
            whole_parameters,
            parameters: estimate.parameters,
            gradients: estimate.gradients,
            optimizer: estimate.optimizer.unwrap_or(0),
            with_gradients,
            after_step: since(LIVE.load(Relaxed)),
            peak: since(PEAK.load(Relaxed)),
            segments: segments(),
            pss_with_gradients,
            pss_after_step: pss(),
        });
        ddp.barrier()?;
    }
    Ok(memory.unwrap())
}

#[test]
#[ignore = "a rank, which the other test starts"]
fn a_rank() {
    let mut options = WorldOptions::from_env().unwrap();
    options.engine = Some(EngineChoice::Shm);
    options.timeout = Duration::from_secs(50);
    let ddp = Ddp::init_with(options).unwrap();
    // The harness has begun a line.
    println!("\nMEMORY {}", serde_json::to_string(&measure(&ddp).unwrap()).unwrap());
    ddp.finish().unwrap();
}

#[test]
fn a_process_holds_its_part_and_its_share_of_the_segments() {
    let program = std::env::current_exe().unwrap().display().to_string();
    for world in 1..=4 {
        let ranks = job::job(&program, world, &["--exact", "a_rank", "--ignored", "--nocapture"]);
        for (rank, output) in ranks.iter().enumerate() {
            assert!(output.status.success(), "rank {rank} of {world}: {}", job::stderr(output));
            let memory: Memory = serde_json::from_str(job::line(&job::stdout(output), "MEMORY ")).unwrap();
            check(rank, world, &memory);
        }
    }
}

fn check(rank: usize, world: usize, memory: &Memory) {
    // Parameters, gradients and the two moments of Adam are equally large.
    let part = memory.whole_parameters as f64 / world as f64;
    let (all, between_steps) = (4.0 * part, 3.0 * part);
    let share = memory.segments as f64 / world as f64;
    let mib = |bytes: usize| bytes as f64 / MIB;
    println!(
        "rank {rank} of {world}: (P + G + O)/N {:.1} MiB, allocated {:.1} MiB ({:+.1} %), at most {:.1} MiB in a step; \
        (P + O)/N {:.1} MiB, allocated after the step {:.1} MiB ({:+.1} %)\n\
        rank {rank} of {world}: share of the segments {:.1} MiB; PSS {:.1} MiB, after the step {:.1} MiB",
        all / MIB,
        mib(memory.with_gradients),
        100.0 * (memory.with_gradients as f64 / all - 1.0),
        mib(memory.peak),
        between_steps / MIB,
        mib(memory.after_step),
        100.0 * (memory.after_step as f64 / between_steps - 1.0),
        share / MIB,
        mib(memory.pss_with_gradients),
        mib(memory.pss_after_step),
    );
    let near = |bytes: f64, formula: f64| (bytes / formula - 1.0).abs() <= 0.05;
    assert!(near(memory.with_gradients as f64, all), "rank {rank} of {world}: {all} bytes expected: {memory:?}");
    assert!(near(memory.after_step as f64, between_steps), "rank {rank} of {world}: {between_steps} bytes: {memory:?}");
    let estimate = memory.parameters + memory.gradients + memory.optimizer;
    assert!(near(estimate as f64, all), "rank {rank} of {world}: {all} bytes expected: {memory:?}");
    // Buffers of the engine: a segment for each group, at most three buckets.
    assert!(memory.segments > 0 && share <= 3.0 * LARGEST_BYTES, "rank {rank} of {world}: {memory:?}");
    // Up to two whole parameters, or one and its gradient, besides activations.
    assert!(memory.peak as f64 <= all + 3.0 * LARGEST_BYTES, "rank {rank} of {world}: {memory:?}");
    let system = all + 3.0 * LARGEST_BYTES + 100.0 * MIB;
    for pss in [memory.pss_with_gradients, memory.pss_after_step] {
        assert!(pss as f64 <= system, "rank {rank} of {world}: {system} bytes at most: {memory:?}");
    }
}
