//! Gathers and reductions of divided tensors in device memory.

use std::time::{Duration, Instant};

use burn_ddp_comm::{DType, Error, PartReduction, ReduceOp, RowDivision};
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{DeviceBuffer, DeviceElements, Event, Piece};

use crate::common::{Rank, all_reduce, assert_clean, on_devices, patient, place};

/// Elements of a row.
const ROW: usize = 50;

fn division(rows: usize, world_size: usize) -> RowDivision {
    RowDivision { rows, row_bytes: 4 * ROW, world_size }
}

fn elements(rank: &Rank, input: &DeviceBuffer, output: &DeviceBuffer, ready: Option<Event>) -> DeviceElements {
    let piece = Piece {
        input: input.pointer(),
        input_elems: input.len_bytes() / 4,
        output: output.pointer(),
        output_elems: output.len_bytes() / 4,
    };
    // SAFETY: the machine is a fake: access outside an allocation is an error, and harms nothing.
    unsafe { DeviceElements::new(rank.rank(), vec![piece], ready) }
}

/// Elements of the tensor of one rank.
fn values(rank: usize, step: usize, rows: usize) -> Vec<f32> {
    (0..rows * ROW).map(|i| (i + 7 * step) as f32 * (rank + 1) as f32).collect()
}

/// The inputs are written late: a call that does not wait for them would take the old values. Rows that do not divide
/// evenly, a rank without rows, and no rows at all are among the cases.
#[test]
fn parts_become_wholes_and_wholes_become_parts() {
    let sum = PartReduction::Op(ReduceOp::Sum);
    for (n, rows) in [(1, 3), (2, 4), (2, 5), (3, 7), (3, 2), (2, 0)] {
        let machine = Machine::new(n);
        on_devices(&machine, n, patient(), |rank| {
            let (group, division) = (rank.world.group().unwrap(), division(rows, n));
            let own = division.rows_of(rank.rank());
            let (part, whole) = (rank.room(own.len() * ROW), rank.room(rows * ROW));
            let own = own.start * ROW..own.end * ROW;
            for step in 0..5 {
                let wanted = values(0, step, rows);
                let ready = rank.compute(&part, wanted[own.clone()].to_vec(), Duration::from_millis(2));
                let mut place = elements(&rank, &part, &whole, Some(ready));
                group.all_gather_parts_on_device(DType::F32, division, &mut place, 3).unwrap();
                assert_eq!(rank.result(&whole, place.done()), wanted, "{rows} rows, step {step}");

                let ready = rank.compute(&whole, values(rank.rank(), step, rows), Duration::from_millis(2));
                let mut place = elements(&rank, &whole, &part, Some(ready));
                group.reduce_scatter_parts_on_device(DType::F32, division, &mut place, &sum, 4).unwrap();
                let factor = (1..=n).sum::<usize>() as f32;
                let wanted: Vec<f32> = values(0, step, rows)[own.clone()].iter().map(|x| x * factor).collect();
                assert_eq!(rank.result(&part, place.done()), wanted, "{rows} rows, step {step}");
            }
        });
        assert_clean(&machine);
    }
}

#[test]
fn the_host_does_not_wait_for_the_device() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let (group, division) = (rank.world.group().unwrap(), division(2, 2));
        let (part, whole) = (rank.room(ROW), rank.room(2 * ROW));
        let gather = |ready| {
            let mut place = elements(&rank, &part, &whole, ready);
            group.all_gather_parts_on_device(DType::F32, division, &mut place, 0).unwrap();
            place
        };
        gather(None);
        let ready = rank.compute(&part, vec![rank.rank() as f32; ROW], Duration::from_secs(3));
        let start = Instant::now();
        let place = gather(Some(ready));
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!(rank.result(&whole, place.done()), [[0.0; ROW], [1.0; ROW]].concat());
    });
}

/// A rank of weight 0 is absent, even with NaN.
#[test]
fn weights_make_shares() {
    for (rows, weights, expected) in [
        (6, [1.0, 2.0, 5.0], (10.0 + 2.0 * 20.0 + 5.0 * 30.0) / 8.0),
        (6, [3.0, 0.0, 1.0], 15.0),
        (7, [3.0, 0.0, 1.0], 15.0),
        (7, [2.0, 2.0, 2.0], 20.0),
    ] {
        let machine = Machine::new(3);
        on_devices(&machine, 3, patient(), |rank| {
            let (group, division) = (rank.world.group().unwrap(), division(rows, 3));
            let (whole, part) = (rank.room(rows * ROW), rank.room(division.rows_of(rank.rank()).len() * ROW));
            let own = if weights[rank.rank()] == 0.0 { f32::NAN } else { (rank.rank() + 1) as f32 * 10.0 };
            let ready = rank.compute(&whole, vec![own; rows * ROW], Duration::from_millis(1));
            let mut place = elements(&rank, &whole, &part, Some(ready));
            let weighted = PartReduction::Weighted(weights.to_vec());
            group.reduce_scatter_parts_on_device(DType::F32, division, &mut place, &weighted, 0).unwrap();
            let got = rank.result(&part, place.done());
            let near = |x: &f32| (x - expected as f32).abs() <= expected as f32 * 3.0 * f32::EPSILON;
            assert!(got.iter().all(near), "{weights:?}: {} instead of {expected}", got[0]);
        });
        assert_clean(&machine);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let (group, fits) = (rank.world.group().unwrap(), division(3, 2));
        let (part, whole) = (rank.room(fits.rows_of(rank.rank()).len() * ROW), rank.room(3 * ROW));
        let gather = |division, place: &mut DeviceElements| {
            group.all_gather_parts_on_device(DType::F32, division, place, 0).map_err(|error| {
                assert!(error.group_usable(), "{error}");
                error.to_string()
            })
        };
        let mut right = elements(&rank, &part, &whole, None);
        for (refused, says) in [
            (gather(division(3, 3), &mut right), "between 3 ranks, but the group has 2"),
            (gather(division(3, 0), &mut right), "between 0 ranks"),
            (gather(division(8, 2), &mut right), "but the RowDivision has 800 and 1600"),
            (gather(fits, &mut elements(&rank, &whole, &part, None)), "an input of 600 bytes and room for"),
            (gather(fits, &mut place(rank.rank(), &[&part, &whole], None)), "2 pieces for a gather"),
        ] {
            let text = refused.unwrap_err();
            assert!(text.contains(says), "{text}");
        }
        let error = group.all_gather_parts_on_device(DType::F32, fits, &mut 5_u32, 0).unwrap_err().to_string();
        assert!(error.contains("burn_ddp_nccl::DeviceElements"), "{error}");
        for (weights, says) in [(vec![0.0, 0.0], "nothing to average"), (vec![1.0], "1 weights for 2 ranks")] {
            let (mut place, weights) = (elements(&rank, &whole, &part, None), PartReduction::Weighted(weights));
            let refused = group.reduce_scatter_parts_on_device(DType::F32, fits, &mut place, &weights, 0);
            let error = refused.unwrap_err();
            assert!(error.group_usable() && error.to_string().contains(says), "{error}");
        }
        gather(fits, &mut right).unwrap();
    });
    assert_clean(&machine);
}

/// Other tags, divisions, weights or memories are other calls.
#[test]
fn different_calls_are_noticed() {
    let machine = Machine::new(2);
    for odd in ["tags", "rows", "weights", "memories"] {
        let errors = on_devices(&machine, 2, patient(), |rank| {
            let (group, is_odd) = (rank.world.group().unwrap(), |what| rank.rank() == 1 && odd == what);
            let division = match is_odd("rows") {
                true => RowDivision { rows: 8, row_bytes: 2 * ROW, world_size: 2 },
                false => division(4, 2),
            };
            let (part, whole) = (rank.room(2 * ROW), rank.room(4 * ROW));
            let (other, tag) = (if is_odd("weights") { 3.0 } else { 2.0 }, u64::from(is_odd("tags")));
            let weights = PartReduction::Weighted(vec![1.0, other]);
            if is_odd("memories") {
                let whole = vec![0; division.len_bytes()];
                return group.reduce_scatter_parts(DType::F32, division, &whole, &weights, tag).unwrap_err();
            }
            let mut place = elements(&rank, &whole, &part, None);
            group.reduce_scatter_parts_on_device(DType::F32, division, &mut place, &weights, tag).unwrap_err()
        });
        for error in errors {
            assert!(matches!(error, Error::Mismatch { .. }) && error.to_string().contains(odd), "{odd}: {error}");
        }
    }
    assert_eq!(machine.launched(0) + machine.launched(1), 0);
    assert_clean(&machine);
}

#[test]
fn a_reduction_in_host_memory_does_not_fit_one_on_the_device() {
    let machine = Machine::new(2);
    let errors = on_devices(&machine, 2, patient(), |rank| {
        let (group, buffer) = (rank.world.group().unwrap(), rank.room(4));
        match rank.rank() {
            0 => group.all_reduce(&mut [0.0_f32; 4], ReduceOp::Sum).unwrap_err(),
            _ => all_reduce(&group, &mut place(1, &[&buffer], None), 4, ReduceOp::Sum).unwrap_err(),
        }
    });
    for error in errors {
        assert!(error.to_string().contains("memories (host or device)"), "{error}");
    }
    assert_clean(&machine);
}
