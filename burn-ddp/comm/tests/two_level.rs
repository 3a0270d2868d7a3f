//! Groups that span machines, bit by bit against ranks that are threads.
#![cfg(target_os = "linux")]

mod common;

use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, ProcessGroup, ReduceOp, World, WorldOptions};
use common::{on_world, options, placed};
use half::{bf16, f16};

/// Bytes of all buffers of a collective together: more than go in one exchange.
const MANY: usize = 70_000;

/// Result of one call, to be compared; an error as its text.
type Outcome = (String, std::result::Result<Vec<u8>, String>);

/// Element `index` of `rank`: numbers whose sums depend on the order, zeros of both signs, NaN and infinities.
fn value(rank: usize, index: usize) -> f64 {
    let mixed = (rank as u64 * 1_000_003 + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    match index % 16 {
        3 => -0.0,
        5 if rank % 3 == 1 => f64::NAN,
        5 => -f64::NAN,
        7 if rank == index / 16 % 8 => f64::NAN,
        9 => [0.0, -0.0][(rank + index / 16) % 2],
        11 if rank == 1 => f64::NEG_INFINITY,
        11 if index.is_multiple_of(3) => f64::INFINITY,
        _ => (mixed as f64 / f64::from(1 << 24) - 0.5) * [0.001, 0.7, 1.0, 37.0][(index + rank) % 4],
    }
}

fn bytes(dtype: DType, rank: usize, len: usize) -> Vec<u8> {
    let element = |index: usize| -> Vec<u8> {
        let value = value(rank, index);
        match dtype {
            DType::F64 => value.to_le_bytes().to_vec(),
            DType::F32 => (value as f32).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
            // Beyond the ends of the type, so that sums wrap.
            DType::I64 => ((value * 1e19) as i64).to_le_bytes().to_vec(),
            DType::I32 => ((value * 1e9) as i32).to_le_bytes().to_vec(),
            DType::I8 | DType::U8 => vec![(value * 1e9) as i64 as u8],
            DType::Bool => vec![u8::from(value > 0.0)],
        }
    };
    (0..len).flat_map(element).collect()
}

/// Weights by rank, where ranks of weight 0 are on the machine of rank 0 or elsewhere.
fn weights(machines: &[usize]) -> [(&'static str, Vec<f64>); 4] {
    let ranks = || 0..machines.len();
    [
        ("equal weights", vec![2.5; machines.len()]),
        ("different weights", ranks().map(|rank| 0.3 + rank as f64 * 1.7).collect()),
        ("one weight 0", ranks().map(|rank| if rank == 1 { 0.0 } else { 1.0 + rank as f64 }).collect()),
        (
            "a machine of weight 0",
            ranks().map(|rank| if machines[rank] == 1 { 0.0 } else { 1.5 + rank as f64 }).collect(),
        ),
    ]
}

/// Every reduction, on one rank.
fn reductions(group: &ProcessGroup, machines: &[usize]) -> Vec<Outcome> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut outcomes = Vec::new();
    for dtype in DType::ALL {
        for len in [0, 1, 37, MANY / ranks / dtype.size_bytes()] {
            let mut add = |what: String, result: burn_ddp_comm::Result<()>, buf: Vec<u8>| {
                let what = format!("{what} of {len} elements of {dtype}");
                outcomes.push((what, result.map(|()| buf).map_err(|error| error.to_string())));
            };
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)) {
                let mut buf = bytes(dtype, rank, len);
                let done = group.all_reduce_bytes(dtype, &mut buf, op, 0);
                add(format!("all_reduce, {op},"), done, buf);
                let mut row = vec![0; len / 3 * dtype.size_bytes()];
                let done = group.reduce_scatter_bytes(dtype, &bytes(dtype, rank, len / 3 * ranks), &mut row, op);
                add(format!("reduce_scatter, {op},"), done, row);
            }
            for (name, weights) in weights(machines).iter().filter(|_| dtype.is_float()) {
                let mut buf = bytes(dtype, rank, len);
                let done = group.all_reduce_weighted_bytes(dtype, &mut buf, weights[rank], 0);
                add(format!("all_reduce_weighted, {name},"), done, buf);
            }
            let mut buffers = group.shared_buffers(&[len * dtype.size_bytes()]).unwrap();
            let buffer = &mut buffers[0];
            for op in [ReduceOp::Mean, ReduceOp::Sum, ReduceOp::Max].into_iter().filter(|op| op.supports(dtype)) {
                buffer.bytes_mut().copy_from_slice(&bytes(dtype, rank, len));
                let view = group.all_reduce_shared(dtype, buffer, op, 0);
                let seen = view.as_ref().map_or_else(|_| vec![], |view| view.to_vec());
                add(format!("all_reduce_shared, {op},"), view.map(drop), seen);
            }
            for (name, weights) in weights(machines).iter().filter(|_| dtype.is_float()) {
                buffer.bytes_mut().copy_from_slice(&bytes(dtype, rank, len));
                let view = group.all_reduce_weighted_shared(dtype, buffer, weights[rank], 0);
                let seen = view.as_ref().map_or_else(|_| vec![], |view| view.to_vec());
                add(format!("all_reduce_weighted_shared, {name},"), view.map(drop), seen);
            }
        }
    }
    outcomes
}

/// The same bits on each rank as of ranks that are threads.
fn same_bits(machines: &[usize]) {
    let run = |world: World| {
        let group = world.group().unwrap();
        let outcomes = reductions(&group, machines);
        (group.engine(), outcomes)
    };
    let got = on_world(placed(machines, &options()), run);
    let expected = World::spawn(machines.len(), run);
    for (rank, ((engine, got), (_, expected))) in got.into_iter().zip(expected).enumerate() {
        assert_eq!((engine, got.len()), ("shm+tcp", expected.len()));
        for ((what, got), (_, expected)) in got.iter().zip(&expected) {
            let (got, expected) = (got.as_ref().expect(what), expected.as_ref().expect(what));
            let first = got.iter().zip(expected).position(|(got, expected)| got != expected);
            assert_eq!((first, got.len()), (None, expected.len()), "byte of {what} on rank {rank} of {machines:?}");
        }
    }
}

#[test]
fn two_machines_of_two() {
    same_bits(&[0, 0, 1, 1]);
}

#[test]
fn two_machines_of_four() {
    same_bits(&[0, 0, 0, 0, 1, 1, 1, 1]);
}

#[test]
fn three_machines_of_three() {
    same_bits(&[0, 0, 0, 1, 1, 1, 2, 2, 2]);
}

#[test]
fn four_machines_of_four() {
    let blocks: Vec<usize> = (0..16).map(|rank| rank / 4).collect();
    same_bits(&blocks);
}

#[test]
fn two_machines_of_three() {
    same_bits(&[0, 0, 0, 1, 1, 1]);
}

#[test]
fn a_rank_alone_and_a_machine_of_five() {
    same_bits(&[0, 1, 1, 1, 1, 1]);
}

#[test]
fn ranks_dealt_out_to_two_machines() {
    same_bits(&[0, 1, 0, 1, 0, 1, 0, 1]);
}

/// Bytes of `len` elements, a repeated block of 10,007.
fn long(dtype: DType, rank: usize, len: usize) -> Vec<u8> {
    let some = bytes(dtype, rank, 10_007);
    some.into_iter().cycle().take(len * dtype.size_bytes()).collect()
}

/// On one rank: reductions of more elements than a rank has under way at a time.
fn long_reductions(group: &ProcessGroup) -> Vec<Vec<u8>> {
    let (rank, ranks, len) = (group.rank(), group.world_size(), 400_001);
    let mut results = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let mut mean = long(dtype, rank, len);
        group.all_reduce_bytes(dtype, &mut mean, ReduceOp::Mean, 0).unwrap();
        let mut row = vec![0; len / ranks * dtype.size_bytes()];
        let rows = long(dtype, rank, len / ranks * ranks);
        group.reduce_scatter_bytes(dtype, &rows, &mut row, ReduceOp::Sum).unwrap();
        results.extend([mean, row]);
        // Weights whose ratios stay or change between calls, a rank of weight 0, and a machine of weight 0.
        for weights in
            [[2.0; 5], [0.5; 5], [0.3, 0.0, 1.0, 7.5, 2.0], [0.6, 0.0, 2.0, 15.0, 4.0], [0.0, 0.0, 0.0, 1.0, 2.0]]
        {
            let mut weighted = long(dtype, rank, len);
            group.all_reduce_weighted_bytes(dtype, &mut weighted, weights[rank], 0).unwrap();
            results.push(weighted);
            let error = group.all_reduce_weighted_bytes(dtype, &mut vec![0; len * 2], 0.0, 0).unwrap_err();
            assert!(error.group_usable(), "{error}");
        }
    }
    // The second reduction runs while a view of the first one's result is alive.
    let mut buffers = group.shared_buffers(&[len * 4]).unwrap();
    buffers[0].bytes_mut().copy_from_slice(&long(DType::F32, rank, len));
    let first = group.all_reduce_shared(DType::F32, &mut buffers[0], ReduceOp::Sum, 0).unwrap();
    buffers[0].bytes_mut().copy_from_slice(&long(DType::F32, rank + 1, len));
    let second = group.all_reduce_shared(DType::F32, &mut buffers[0], ReduceOp::Sum, 0).unwrap();
    results.extend([first.to_vec(), second.to_vec()]);
    results
}

#[test]
fn long_buffers_have_the_bits_of_threads_too() {
    for machines in [[0, 0, 0, 1, 1], [0, 1, 0, 2, 1]] {
        let run = |world: World| long_reductions(&world.group().unwrap());
        let (got, expected) = (on_world(placed(&machines, &options()), run), World::spawn(machines.len(), run));
        for (rank, (got, expected)) in got.iter().zip(&expected).enumerate() {
            for (nth, (got, expected)) in got.iter().zip(expected).enumerate() {
                let first = got.iter().zip(expected).position(|(got, expected)| got != expected);
                assert_eq!((first, got.len()), (None, expected.len()), "result {nth} on rank {rank} of {machines:?}");
            }
        }
    }
}

#[test]
fn weights_that_are_all_0_are_refused_by_all() {
    for len in [3, MANY] {
        let text = |world: World| {
            let mut buf = vec![1.0_f32; len];
            let group = world.group().unwrap();
            let error = group.all_reduce_weighted(&mut buf, 0.0).unwrap_err();
            assert!(error.group_usable(), "{error}");
            group.barrier().unwrap();
            error.to_string()
        };
        let got = on_world(placed(&[0, 0, 1, 1], &options()), text);
        assert!(got.iter().all(|text| text.contains("weight")), "{got:?}");
        assert_eq!(got, World::spawn(4, text));
    }
}

#[test]
fn a_refused_weight_replaces_no_buffer() {
    for refused in [f64::NAN, -1.0] {
        let unchanged = on_world(placed(&[0, 0, 1, 1], &options()), |world| {
            let group = world.group().unwrap();
            let own = vec![group.rank() as f32; 400_001];
            let mut buf = own.clone();
            // The refused weight looks like the 0 of the call before.
            group.all_reduce_weighted(&mut buf, f64::from(u8::from(group.rank() != 1))).unwrap();
            buf.clone_from(&own);
            let error = group.all_reduce_weighted(&mut buf, if group.rank() == 1 { refused } else { 1.0 }).unwrap_err();
            assert!(error.group_usable() && error.to_string().contains("the weight of rank 1"), "{error}");
            group.barrier().unwrap();
            buf == own
        });
        assert_eq!(unchanged, [true; 4], "{refused}");
    }
}

#[test]
fn a_send_to_another_machine_that_meets_a_barrier_ends_at_once() {
    let lively = WorldOptions { heartbeat: Duration::from_millis(100), ..options() };
    let errors = on_world(placed(&[0, 0, 1, 1], &lively), |world| {
        let group = world.group().unwrap();
        let begin = Instant::now();
        let result = if world.rank() == 1 { group.send(&[1_u8], 3) } else { group.barrier() };
        (result.unwrap_err().to_string(), begin.elapsed())
    });
    for (error, took) in errors {
        for part in ["rank 1 is in send", "are in barrier", "tests/two_level.rs"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(took < options().timeout / 2, "{took:?}");
    }
}
