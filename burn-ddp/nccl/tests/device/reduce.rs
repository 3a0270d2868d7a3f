//! Reductions in device memory: the right numbers, after their input is ready.

use std::time::{Duration, Instant};

use burn_ddp_comm::engine::OnDevice;
use burn_ddp_comm::{DType, Error, ReduceOp};
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{DeviceElements, HostMemory, Piece};

use crate::common::{all_reduce, assert_clean, floats, on_devices, patient, place, run};

/// The input is written late: a reduction that does not wait for it would reduce the old values.
#[test]
fn a_reduction_waits_for_its_input_and_is_waited_for() {
    for n in [1, 2, 3] {
        let machine = Machine::new(n);
        on_devices(&machine, n, patient(), |rank| {
            let group = rank.world.group().unwrap();
            let buffer = rank.room(1000);
            for step in 0..20 {
                let value = (rank.rank() + step) as f32;
                let ready = rank.compute(&buffer, vec![value; 1000], Duration::from_millis(3));
                let mut place = place(rank.rank(), &[&buffer], Some(ready));
                all_reduce(&group, &mut place, 1000, ReduceOp::Sum).unwrap();
                let sum = (0..n).map(|other| (other + step) as f32).sum::<f32>();
                assert_eq!(rank.result(&buffer, place.done()), vec![sum; 1000], "step {step}");
            }
        });
        assert_clean(&machine);
    }
}

/// A reduction returns when enqueued: the device may still be computing its input.
#[test]
fn the_host_does_not_wait_for_the_device() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let buffer = rank.room(10);
        let mut warm = place(rank.rank(), &[&buffer], None);
        all_reduce(&group, &mut warm, 10, ReduceOp::Max).unwrap();
        let ready = rank.compute(&buffer, vec![1.0; 10], Duration::from_secs(3));
        let start = Instant::now();
        let mut place = place(rank.rank(), &[&buffer], Some(ready));
        all_reduce(&group, &mut place, 10, ReduceOp::Sum).unwrap();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!(rank.result(&buffer, place.done()), [2.0; 10]);
    });
}

#[test]
fn pieces_are_reduced_as_one() {
    let machine = Machine::new(3);
    on_devices(&machine, 3, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let (a, b, c) = (rank.room(5), rank.room(700), rank.room(700));
        let own = rank.rank() as f32;
        rank.compute(&a, vec![own; 5], Duration::ZERO);
        let ready = rank.compute(&b, vec![own * 10.0; 700], Duration::from_millis(1));
        let pieces = vec![
            Piece::reduced(a.pointer(), a.pointer(), 5),
            Piece::reduced(0, 0, 0),
            Piece::reduced(b.pointer(), c.pointer(), 700),
        ];
        // SAFETY: the buffers live until the end, and are as long as this says.
        let mut place = unsafe { DeviceElements::new(rank.rank(), pieces, Some(ready)) };
        all_reduce(&group, &mut place, 705, ReduceOp::Mean).unwrap();
        assert_eq!(rank.result(&a, place.done()), [1.0; 5]);
        assert_eq!(rank.result(&c, place.done()), vec![10.0; 700]);
        assert_eq!(rank.result(&b, None), vec![own * 10.0; 700], "an input that is not an output stays");
    });
    assert_clean(&machine);
}

#[test]
fn events_are_used_again() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let buffer = rank.room(4);
        for _ in 0..100 {
            let ready = rank.compute(&buffer, vec![1.0; 4], Duration::ZERO);
            let mut place = place(rank.rank(), &[&buffer], Some(ready));
            all_reduce(&group, &mut place, 4, ReduceOp::Sum).unwrap();
            rank.result(&buffer, place.done());
            // The watchdog gives an event back when it has looked at it.
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let (_, events) = machine.streams_and_events();
    assert!(events <= 60, "{events} events for 100 reductions, one at a time, on each of 2 ranks");
}

/// Factors come before the sum: means are right up to the rounding of the factor.
#[test]
fn weights_make_shares() {
    for memory in [HostMemory::ByHost, HostMemory::ThroughDevice] {
        let machine = Machine::new(3);
        run(&machine, 3, (patient(), memory), |rank| {
            let group = rank.world.group().unwrap();
            for (weights, expected) in [
                ([2.0, 2.0, 2.0], 20.0),
                ([1.0, 2.0, 5.0], (10.0 + 2.0 * 20.0 + 5.0 * 30.0) / 8.0),
                ([1.0, 0.0, 1.0], 20.0),
                ([f64::MAX, f64::MAX, f64::MAX / 2.0], (10.0 + 20.0 + 15.0) / 2.5),
            ] {
                let (weight, own) = (weights[rank.rank()], (rank.rank() + 1) as f32 * 10.0);
                // A rank without weight is absent, even with NaN.
                let own = if weight == 0.0 { f32::NAN } else { own };
                let got = match memory {
                    HostMemory::ThroughDevice => {
                        let mut values = vec![own; 300];
                        group.all_reduce_weighted(&mut values, weight).unwrap();
                        values
                    }
                    HostMemory::ByHost => {
                        let buffer = rank.room(300);
                        let ready = rank.compute(&buffer, vec![own; 300], Duration::from_millis(1));
                        let mut place = place(rank.rank(), &[&buffer], Some(ready));
                        let elements = OnDevice { dtype: DType::F32, len_elems: 300, place: &mut place };
                        group.all_reduce_weighted_on_device(elements, weight, 0).unwrap();
                        rank.result(&buffer, place.done())
                    }
                };
                let near = |x: &f32| (x - expected as f32).abs() <= expected as f32 * 3.0 * f32::EPSILON;
                assert!(got.iter().all(near), "{weights:?}: {} instead of {expected}", got[0]);
            }
        });
        assert_clean(&machine);
    }
}

#[test]
fn bad_weights_are_refused_by_all() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let buffer = rank.room(3);
        let refused = |weight: f64| {
            let mut place = place(rank.rank(), &[&buffer], None);
            let elements = OnDevice { dtype: DType::F32, len_elems: 3, place: &mut place };
            let error = group.all_reduce_weighted_on_device(elements, weight, 0).unwrap_err();
            assert!(error.group_usable() && place.done().is_none(), "{error}");
            error.to_string()
        };
        let text = refused(if rank.rank() == 1 { f64::NAN } else { 1.0 });
        assert!(text.contains("the weight of rank 1 is NaN"), "{text}");
        assert!(refused(0.0).contains("nothing to average"));
        group.barrier().unwrap();
    });
    assert_eq!(machine.launched(0), 0);
    assert_clean(&machine);
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let buffer = rank.room(8);
        let refused = |ordinal: usize, dtype: DType, len_elems: usize, op: ReduceOp| {
            let mut place = place(ordinal, &[&buffer], None);
            let result = group.all_reduce_on_device(OnDevice { dtype, len_elems, place: &mut place }, op, 0);
            let error = result.unwrap_err();
            assert!(error.group_usable(), "{error}");
            error.to_string()
        };
        let own = rank.rank();
        assert!(refused(own, DType::F32, 7, ReduceOp::Sum).contains("[8] elements, which do not add up to 7"));
        assert!(refused(own, DType::F32, 9, ReduceOp::Sum).contains("do not add up to 9"));
        assert!(refused(1 - own, DType::F32, 8, ReduceOp::Sum).contains("for an engine on device"));
        assert!(refused(own, DType::I32, 8, ReduceOp::Mean).contains("mean is not defined for i32"));
        let mut other = 5_u32;
        let elements = OnDevice { dtype: DType::F32, len_elems: 8, place: &mut other };
        let text = group.all_reduce_on_device(elements, ReduceOp::Sum, 0).unwrap_err().to_string();
        assert!(text.contains("DeviceElements"), "{text}");
        // The group is still usable after these errors.
        let ready = rank.compute(&buffer, vec![2.0; 8], Duration::ZERO);
        let mut place = place(own, &[&buffer], Some(ready));
        all_reduce(&group, &mut place, 8, ReduceOp::Product).unwrap();
        assert_eq!(rank.result(&buffer, place.done()), [4.0; 8]);
    });
    assert_clean(&machine);
}

#[test]
fn different_calls_and_different_cuts_are_noticed() {
    let machine = Machine::new(2);
    let errors = on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let (a, b) = (rank.room(3), rank.room(5));
        let buffers = if rank.rank() == 0 { [&a, &b] } else { [&b, &a] };
        let error = all_reduce(&group, &mut place(rank.rank(), &buffers, None), 8, ReduceOp::Sum).unwrap_err();
        assert!(
            error.group_usable() && error.to_string().contains("rank 1 passed its elements in other pieces"),
            "{error}"
        );
        let op = if rank.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
        all_reduce(&group, &mut place(rank.rank(), &[&a, &b], None), 8, op).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
    assert_eq!(machine.launched(0) + machine.launched(1), 0);
    assert_clean(&machine);
}

#[test]
fn nothing_is_reduced_without_a_launch() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let mut place = place(rank.rank(), &[], None);
        all_reduce(&group, &mut place, 0, ReduceOp::Sum).unwrap();
        assert!(place.done().unwrap().is_done().unwrap());
    });
    assert_eq!(machine.launched(0), 0);
}

/// Elements in host memory do not go to the device unless `HostMemory` says so.
#[test]
fn host_memory_is_the_hosts() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        assert_eq!(rank.world.engine(), "nccl");
        let mut x = [1.0_f32, rank.rank() as f32];
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!(x, [2.0, 1.0]);
        let rows = group.all_gather(&[rank.rank() as i32]).unwrap();
        assert_eq!(rows, [0, 1]);
    });
    assert_eq!(machine.launched(0), 0);
    assert_clean(&machine);
}

/// Sums of halves and integers too.
#[test]
fn every_dtype_arrives_as_it_is() {
    let machine = Machine::new(2);
    on_devices(&machine, 2, patient(), |rank| {
        let group = rank.world.group().unwrap();
        let buffer = rank.device.alloc(64).unwrap();
        for (dtype, one, sum) in [
            (DType::F64, 1.5_f64.to_le_bytes().to_vec(), 3.0_f64.to_le_bytes().to_vec()),
            (DType::F16, vec![0, 0x3c], vec![0, 0x40]),
            (DType::BF16, vec![0x80, 0x3f], vec![0, 0x40]),
            (DType::I64, 7_i64.to_le_bytes().to_vec(), 14_i64.to_le_bytes().to_vec()),
            (DType::I32, i32::MAX.to_le_bytes().to_vec(), (-2_i32).to_le_bytes().to_vec()),
            (DType::I8, vec![100], vec![200]),
            (DType::U8, vec![200], vec![144]),
        ] {
            rank.machine.write(buffer.pointer(), &one);
            let pieces = vec![Piece::reduced(buffer.pointer(), buffer.pointer(), 1)];
            // SAFETY: the buffer lives until the end, and has room for any element.
            let mut place = unsafe { DeviceElements::new(rank.rank(), pieces, None) };
            group.all_reduce_on_device(OnDevice { dtype, len_elems: 1, place: &mut place }, ReduceOp::Sum, 0).unwrap();
            rank.result(&buffer, place.done());
            assert_eq!(rank.machine.read(buffer.pointer(), one.len()), sum, "{dtype}");
        }
        assert_eq!(floats(&[0, 0, 128, 63]), [1.0]);
    });
    assert_clean(&machine);
}
