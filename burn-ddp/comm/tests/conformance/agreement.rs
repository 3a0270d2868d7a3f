//! Ranks that do not call the same get an error that shows what each called; ranks that may differ do not.

use burn_ddp_comm::{DType, Error, ProcessGroup, ReduceOp, TensorType};

use crate::harness::{Make, at_once, fatal, groups, refused};

type Call = fn(&ProcessGroup) -> Result<(), Error>;

/// Fails unless `error` is a mismatch between rank `odd` and another, with the call sites of both in this file.
fn assert_mismatch(error: &Error, odd: usize) {
    let Error::Mismatch { first, second } = error else { panic!("not a mismatch: {error}") };
    assert!(first.rank < second.rank && (first.rank == odd || second.rank == odd), "{error}");
    let text = error.to_string();
    for side in [first, second] {
        let site = side.call.site.to_string();
        let line = site.strip_prefix(file!()).unwrap_or_else(|| panic!("called elsewhere: {text}"));
        assert!(line.starts_with(':') && text.contains(&side.call.to_string()), "{text}");
    }
    assert_ne!(first.call.site, second.call.site, "{text}");
}

pub fn each_difference_is_a_mismatch_with_both_call_sites(make: Make) {
    const REFERENCE: Call = |group| group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum);
    let different: [(&str, Call); 8] = [
        ("collectives", |group| group.barrier()),
        ("collectives", |group| group.broadcast(&mut [1.0_f32; 10], 0)),
        ("collectives", |group| group.all_reduce_weighted(&mut [1.0_f32; 10], 1.0)),
        ("collectives", |group| group.all_gather_object(&1).map(drop)),
        ("reduce ops", |group| group.all_reduce(&mut [1.0_f32; 10], ReduceOp::Max)),
        ("dtypes", |group| group.all_reduce(&mut [1_i32; 10], ReduceOp::Sum)),
        ("lengths", |group| group.all_reduce(&mut [1.0_f32; 100_000], ReduceOp::Sum)),
        ("tags", |group| group.all_reduce_bytes(DType::F32, &mut [0; 40], ReduceOp::Sum, 5)),
    ];
    for (what, call) in different {
        // With four ranks the odd one has a peer on its machine where there are two machines.
        for (n, odd) in [(2, 0), (2, 1), (4, 1), (4, 2)] {
            let results =
                at_once(|| groups(make, n, |group| if group.rank() == odd { call(group) } else { REFERENCE(group) }));
            for result in results {
                let error = fatal(result);
                assert_mismatch(&error, odd);
                assert!(error.to_string().contains(what), "{what}: {error}");
            }
        }
    }
    let results = groups(make, 2, |group| match group.rank() {
        0 => group.broadcast(&mut [0_u8; 3], 0),
        _ => group.broadcast(&mut [0_u8; 3], 1),
    });
    for result in results {
        let error = fatal(result);
        assert_mismatch(&error, 1);
        assert!(error.to_string().contains("roots"), "{error}");
    }
}

pub fn a_mismatch_names_the_odd_rank_in_a_larger_world(make: Make) {
    for odd in 0..4 {
        let results = at_once(|| {
            groups(make, 4, |group| match group.rank() == odd {
                true => group.all_reduce(&mut vec![0.0_f64; 50_000], ReduceOp::Min),
                false => group.all_reduce(&mut vec![0.0_f64; 50_001], ReduceOp::Min),
            })
        });
        results.into_iter().for_each(|result| assert_mismatch(&fatal(result), odd));
    }
}

pub fn tensors_of_other_shapes_are_a_mismatch_that_shows_both(make: Make) {
    /// A call with 6 elements.
    type OfShape = fn(&ProcessGroup, TensorType) -> Result<(), Error>;
    const SUM: ReduceOp = ReduceOp::Sum;
    let calls: [OfShape; 10] = [
        |group, x| group.all_reduce_bytes(x, &mut [0; 24], SUM, 0),
        |group, x| group.all_reduce_weighted_bytes(x, &mut [0; 24], 1.0, 0),
        |group, x| group.reduce_bytes(x, &mut [0; 24], SUM, 0),
        |group, x| group.reduce_scatter_bytes(x, &vec![0; 24 * group.world_size()], &mut [0; 24], SUM),
        |group, x| group.broadcast_bytes(x, &mut [0; 24], 0),
        |group, x| group.all_gather_bytes(x, &[0; 24]).map(drop),
        |group, x| group.gather_bytes(x, &[0; 24], 1).map(drop),
        |group, x| {
            let whole = vec![0; 24 * group.world_size()];
            group.scatter_bytes(x, (group.rank() == 0).then_some(&whole[..]), &mut [0; 24], 0)
        },
        |group, x| {
            let (whole, mut rows) = (vec![0; 24 * group.world_size()], vec![0; 24 * group.world_size()]);
            group.all_to_all_bytes(x, &whole, &mut rows)
        },
        |group, x| match group.rank() % 2 {
            0 => group.send_bytes(x, &[0; 24], group.rank() + 1),
            _ => group.recv_bytes(x, &mut [0; 24], group.rank() - 1),
        },
    ];
    for (nth, call) in calls.into_iter().enumerate() {
        for n in [2, 4] {
            let dims = |rank: usize| if rank == 1 { &[3, 2][..] } else { &[2, 3] };
            let of = |group: &ProcessGroup| TensorType::new(DType::F32, dims(group.rank()));
            // A rank that the difference does not reach in this call hears of it in the next.
            let part = |group: &ProcessGroup| call(group, of(group)).and_then(|()| group.barrier());
            for result in at_once(|| groups(make, n, part)) {
                let text = fatal(result).to_string();
                let all = ["(shapes differ)", "shape [2, 3]", "shape [3, 2]", "rank 1 called"];
                assert!(all.iter().all(|part| text.contains(part)), "call {nth}, {n} ranks: {text}");
            }
        }
    }
}

pub fn a_missing_call_is_a_mismatch(make: Make) {
    let results = at_once(|| {
        groups(make, 3, |group| {
            if group.rank() != 2 {
                group.broadcast(&mut [0_i32; 4], 0)?;
            }
            group.all_reduce(&mut [0_i32; 4], ReduceOp::Sum)
        })
    });
    results.into_iter().for_each(|result| assert_mismatch(&fatal(result), 2));
}

pub fn swapped_order_is_a_mismatch(make: Make) {
    let results = at_once(|| {
        groups(make, 2, |group| {
            if group.rank() == 0 {
                group.all_reduce(&mut [0.0_f32; 8], ReduceOp::Sum)?;
                group.all_reduce(&mut [0.0_f32; 9], ReduceOp::Sum)
            } else {
                group.all_reduce(&mut [0.0_f32; 9], ReduceOp::Sum)?;
                group.all_reduce(&mut [0.0_f32; 8], ReduceOp::Sum)
            }
        })
    });
    results.into_iter().for_each(|result| assert_mismatch(&fatal(result), 1));
}

#[expect(clippy::if_same_then_else, reason = "the lines differ, and that is the point")]
pub fn call_sites_may_differ(make: Make) {
    groups(make, 3, |group| {
        let mut x = [group.rank() as i64];
        if group.rank() == 0 {
            group.broadcast(&mut x, 0).unwrap();
        } else {
            group.broadcast(&mut x, 0).unwrap();
        }
        assert_eq!(x, [0]);
    });
}

pub fn what_all_ranks_refuse_leaves_the_group_usable(make: Make) {
    for n in [1, 3] {
        groups(make, n, |group| {
            for dtype in [DType::I64, DType::I32, DType::I8, DType::U8, DType::Bool] {
                let error = refused(group.all_reduce_bytes(dtype, &mut [0; 8], ReduceOp::Mean, 0));
                let text = error.to_string();
                assert!(text.contains(&format!("mean is not defined for {dtype}")) && text.contains(file!()), "{text}");
                refused(group.all_reduce_weighted_bytes(dtype, &mut [0; 8], 1.0, 0));
                refused(group.reduce_scatter_bytes(dtype, &vec![0; 8 * n], &mut [0; 8], ReduceOp::Mean));
            }
            refused(group.all_reduce(&mut [true], ReduceOp::Sum));
            refused(group.all_reduce(&mut [true], ReduceOp::Product));
            refused(group.all_reduce_bytes(DType::F32, &mut [0; 7], ReduceOp::Sum, 0));
            refused(group.all_gather_bytes(DType::F64, &[0; 7]));
            refused(group.broadcast_bytes(DType::BF16, &mut [0; 7], 0));
            refused(group.broadcast(&mut [0_u8], n));
            refused(group.broadcast_object(Some(1), n));
            refused(group.reduce_scatter(&vec![0.0_f32; 2 * n + 1], &mut [0.0; 2], ReduceOp::Sum));

            let mut ranks = [group.rank() as i32];
            group.all_reduce(&mut ranks, ReduceOp::Max).unwrap();
            assert_eq!(ranks, [n as i32 - 1]);
        });
    }
}

pub fn what_one_rank_refuses_is_noticed_at_its_next_call(make: Make) {
    let results = at_once(|| {
        groups(make, 2, |group| {
            if group.rank() == 1 {
                refused(group.all_reduce(&mut [1_i32], ReduceOp::Mean));
            }
            group.all_reduce(&mut [1_i32], ReduceOp::Sum)
        })
    });
    for result in results {
        let error = fatal(result);
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("sequence numbers"), "{error}");
    }
}

pub fn bad_weights_are_refused_by_all(make: Make) {
    groups(make, 3, |group| {
        for len in [2, 65_537] {
            let mut buf = vec![1.0_f32; len];
            for bad in [-1.0, f64::NAN, f64::INFINITY] {
                let error = refused(group.all_reduce_weighted(&mut buf, if group.rank() == 2 { bad } else { 1.0 }));
                assert_eq!(error.rank(), Some(2), "{error}");
                assert!(error.to_string().contains("weight of rank 2"), "{error}");
            }
            refused(group.all_reduce_weighted(&mut buf, 0.0));
            group.all_reduce_weighted(&mut buf, 1.0).unwrap();
            assert!(buf.iter().all(|x| *x == 1.0));
        }
    });
}
