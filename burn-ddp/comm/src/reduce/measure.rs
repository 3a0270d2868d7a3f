//! How fast the kernels are: `cargo test --release -p burn-ddp-comm --lib reduce::measure -- --ignored --nocapture`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::kernel::Isa;
use super::*;

/// The median time of a few runs.
fn median(mut run: impl FnMut()) -> Duration {
    let rounds = 9;
    let mut times: Vec<Duration> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort();
    times[rounds / 2]
}

/// GB/s of all that is read and written, beside those of copying as many bytes from place to place.
#[test]
#[ignore = "a measurement"]
fn memory_traffic() {
    for elements in [64 << 10, 512 << 10, 8 << 20, 32 << 20] {
        println!("{elements} elements");
        for (dtype, worlds) in [(DType::F32, &[2, 3, 4, 8][..]), (DType::BF16, &[2, 4]), (DType::F16, &[2, 4])] {
            for world in worlds {
                one(dtype, *world, elements);
            }
        }
    }
}

fn one(dtype: DType, world: usize, elements: usize) {
    let len = elements * dtype.size_bytes();
    let inputs: Vec<Vec<u8>> = (0..world).map(|rank| vec![rank as u8 + 1; len]).collect();
    let mut out = vec![1; len];
    let repeat = ((64 << 20) / len / world).max(1) as u32;
    let copied = (world + 1) * len / 2;
    let (from, mut to) = (vec![1_u8; copied], vec![2_u8; copied]);
    let copy = median(|| (0..repeat).for_each(|_| black_box(&mut to).copy_from_slice(black_box(&from)))) / repeat;
    let gbps = |time: Duration| ((world + 1) * len) as f64 / time.as_secs_f64() / 1e9;
    let mut line = format!("  {dtype:>4} {world} ranks: memcpy {:5.1} GB/s", gbps(copy));
    for isa in Isa::all() {
        let name = format!("{isa:?}");
        let sources: Vec<Source<'_>> = inputs.iter().map(|input| Source::Bytes(input)).collect();
        let mut in_place = sources.clone();
        in_place[0] = Source::Output;
        let sum = Reduction::Op(ReduceOp::Sum);
        line += &format!("; {}", name.split('(').next().unwrap_or_default().split(' ').next().unwrap_or_default());
        for sources in [&sources, &in_place] {
            let mut run = || reduce_with(isa, dtype, sum, sources, (black_box(&mut out), None)).unwrap();
            let time = median(|| (0..repeat).for_each(|_| run())) / repeat;
            line += &format!(" {:5.1} ({:.2})", gbps(time), time.as_secs_f64() / copy.as_secs_f64());
        }
    }
    println!("{line}");
}

/// What a small reduction costs.
#[test]
#[ignore = "a measurement"]
fn small() {
    for elements in [1, 2, 16, 100, 1000] {
        let inputs = vec![vec![1_u8; elements * 4]; 8];
        let mut out = vec![1; elements * 4];
        for world in [2, 3, 8] {
            let mut sources: Vec<Source<'_>> = inputs[..world].iter().map(|input| Source::Bytes(input)).collect();
            let mut line = format!("{elements} f32 on {world} ranks:");
            for place in ["elsewhere", "in place"] {
                let mut run = || {
                    reduce(DType::F32, Reduction::Op(ReduceOp::Sum), black_box(&sources), black_box(&mut out)).unwrap();
                };
                let time = median(|| (0..10_000).for_each(|_| run())) / 10;
                line += &format!(" {place} {:.1} ns", time.as_nanos() as f64 / 1000.0);
                sources[0] = Source::Output;
            }
            println!("{line}");
        }
    }
}
