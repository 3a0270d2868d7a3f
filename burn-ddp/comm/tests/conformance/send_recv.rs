//! Send and receive between two ranks.

use burn_ddp_comm::{DType, Error, ProcessGroup, ReduceOp, WorldOptions};
use std::time::Duration;

use crate::harness::{Make, Together, WORLDS, at_once, fatal, groups, lined_up, members, patient, refused};
use crate::reference_values::{Sample, assert_bits, for_each_dtype, samples};

const LONG: usize = 300_001;

pub fn what_is_sent_arrives(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, from: usize, to: usize, len: usize) {
        let mine: Vec<T> = samples(group.rank(), 0, len);
        if group.rank() == from {
            group.send(&mine, to).unwrap();
        }
        if group.rank() == to {
            let mut buf = mine;
            group.recv(&mut buf, from).unwrap();
            assert_bits(&buf, |index| T::sample(from, index), || format!("{len} {} from {from} to {to}", T::DTYPE));
        }
    }
    for n in [2, 3, 7] {
        groups(make, n, |group| {
            for from in 0..n {
                for to in (0..n).filter(|to| *to != from) {
                    for len in [0, 1, 10] {
                        for_each_dtype!(T => once::<T>(group, from, to, len));
                    }
                    once::<f32>(group, from, to, LONG);
                }
            }
            group.barrier().unwrap();
        });
    }
}

/// Any number of ranks, also one: what each sends goes to the next.
pub fn around_a_ring(make: Make) {
    fn once<T: Sample>(group: &ProcessGroup, len: usize) {
        let (n, rank) = (group.world_size(), group.rank());
        let before = (rank + n - 1) % n;
        let mut got: Vec<T> = samples(99, 0, len);
        group.send_recv(&samples::<T>(rank, 0, len), (rank + 1) % n, &mut got, before).unwrap();
        assert_bits(&got, |index| T::sample(before, index), || format!("{len} {} on {rank} of {n}", T::DTYPE));
    }
    for n in WORLDS {
        groups(make, n, |group| {
            for len in [0, 1, 10, 1000] {
                for_each_dtype!(T => once::<T>(group, len));
            }
            once::<f64>(group, LONG);
        });
    }
}

/// A chain: the first only sends, the last only receives, the others do both at once.
pub fn halves_fit_to_whole_ones(make: Make) {
    for n in [2, 3, 4] {
        groups(make, n, |group| {
            let rank = group.rank();
            for nth in 0..20 {
                let (mine, mut got) = ([rank as i64, nth], [0; 2]);
                match rank {
                    0 => group.send(&mine, 1).unwrap(),
                    _ if rank == n - 1 => group.recv(&mut got, rank - 1).unwrap(),
                    _ => group.send_recv(&mine, rank + 1, &mut got, rank - 1).unwrap(),
                }
                assert!(rank == 0 || got == [rank as i64 - 1, nth]);
            }
            group.barrier().unwrap();
        });
    }
}

/// Two ranks may swap different amounts.
pub fn swaps_of_different_lengths(make: Make) {
    groups(make, 2, |group| {
        let (rank, peer) = (group.rank(), 1 - group.rank());
        let lens = [[3, 5], [0, 4], [LONG, 2]];
        for len in lens {
            let mut got = vec![0.0; len[peer]];
            group.send_recv(&vec![rank as f32; len[rank]], peer, &mut got, peer).unwrap();
            assert_eq!(got, vec![peer as f32; len[peer]]);
        }
    });
}

/// Each pair of ranks counts its own calls, and ranks that take no part notice nothing.
pub fn transfers_and_collectives_are_in_one_order(make: Make) {
    groups(make, 4, |group| {
        let rank = group.rank();
        for nth in 0..50_i32 {
            if rank == 2 {
                group.send(&[nth; 5], 0).unwrap();
            }
            if rank == 0 {
                let mut buf = [0; 5];
                group.recv(&mut buf, 2).unwrap();
                assert_eq!(buf, [nth; 5]);
            }
            let mut sum = [nth];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [4 * nth]);
            if rank % 2 == 1 {
                let (mut got, peer) = ([0.0], 4 - rank);
                group.send_recv(&[f64::from(nth)], peer, &mut got, peer).unwrap();
                assert_eq!(got, [f64::from(nth)]);
                let mut bytes = [0; 8];
                let mine = f64::from(10 * nth + rank as i32).to_le_bytes();
                group.send_recv_bytes(DType::F64, &mine, peer, &mut bytes, peer).unwrap();
                assert_eq!(f64::from_le_bytes(bytes), f64::from(10 * nth + peer as i32));
            }
        }
    });
}

type Call = fn(&ProcessGroup) -> Result<(), Error>;

pub fn what_does_not_fit_is_a_mismatch(make: Make) {
    let cases: [(&str, Call, Call); 9] = [
        ("lengths", |g| g.send(&[1.0_f32; 4], 1), |g| g.recv(&mut [0.0_f32; 5], 0)),
        ("dtypes", |g| g.send(&[1.0_f32; 4], 1), |g| g.recv(&mut [0_i32; 4], 0)),
        ("collectives", |g| g.send(&[1_u8], 1), |g| g.send(&[1_u8], 0)),
        ("collectives", |g| g.recv(&mut [1_u8], 1), |g| g.recv(&mut [1_u8], 0)),
        ("collectives", |g| g.send(&[1_u8], 1), |g| g.barrier()),
        ("collectives", |g| g.all_reduce(&mut [1.0_f64], ReduceOp::Sum), |g| g.recv(&mut [1.0_f64], 0)),
        ("collectives", |g| g.send(&[1_u8], 1), |g| g.send_recv(&[1_u8], 0, &mut [0_u8], 0)),
        (
            "lengths",
            |g| g.send_recv(&[1_u8; 2], 1, &mut [0_u8; 3], 1),
            |g| g.send_recv(&[1_u8; 2], 0, &mut [0_u8; 2], 0),
        ),
        (
            "sequence numbers",
            |g| {
                refused(g.send_bytes(DType::F32, &[0; 3], 1));
                g.send(&[1_u8], 1)
            },
            |g| g.recv(&mut [1_u8], 0),
        ),
    ];
    for (what, first, second) in cases {
        let results = at_once(|| groups(make, 2, |group| if group.rank() == 0 { first(group) } else { second(group) }));
        for result in results {
            let error = fatal(result);
            let text = error.to_string();
            let Error::Mismatch { first, second } = &error else { panic!("{what}: {text}") };
            assert_eq!((first.rank, second.rank), (0, 1), "{what}: {text}");
            assert!(text.contains(&format!("({what} differ)")), "{what}: {text}");
            for side in [first, second] {
                assert!(side.call.site.to_string().starts_with(file!()), "{what}: {text}");
            }
            assert_ne!(first.call.site, second.call.site, "{what}: {text}");
        }
    }
}

pub fn ranks_that_cannot_be_are_refused(make: Make) {
    groups(make, 2, |group| {
        let me = group.rank();
        refused(group.send(&[1_u8], 2));
        refused(group.recv(&mut [1_u8], 2));
        refused(group.send_recv(&[1_u8], 2, &mut [0_u8], 2));
        let error = refused(group.send(&[1_u8], me));
        assert!(error.to_string().contains("itself"), "{error}");
        refused(group.recv(&mut [1_u8], me));
        refused(group.send_recv(&[1_u8; 2], me, &mut [0; 3], me));
        group.barrier().unwrap();
    });
}

pub fn a_rank_that_never_receives_is_named(make: Make) {
    let timeout = Duration::from_secs(1);
    let options = WorldOptions { timeout, heartbeat: Duration::from_millis(50), ..patient() };
    let done = Together::new(3);
    let errors = lined_up(make, 3, options, |world, group| {
        let error = (world.rank() == 0).then(|| fatal(group.send(&vec![1.0_f32; LONG], 2)));
        done.wait();
        error
    });
    let error = errors.into_iter().find_map(|error| error.unwrap()).unwrap();
    let Error::Timeout { reporter: 0, waiting_for, culprit: Some(2), .. } = &error else { panic!("{error}") };
    assert_eq!(*waiting_for, [2], "{error}");
    assert!(error.to_string().contains("in send #0 to rank 2 of group 1 (f32, 300001 elements)"), "{error}");
}

pub fn a_failure_ends_transfers(make: Make) {
    for failing in 0..3 {
        let results = at_once(|| {
            members(make, 3, |world, group| {
                let rank = world.rank();
                if rank == failing {
                    world.fail("no power");
                    return world.check();
                }
                group.send_recv(&[1_u8], (rank + 1) % 3, &mut [0_u8], (rank + 2) % 3)
            })
        });
        for result in results {
            let error = fatal(result);
            assert!(matches!(&error, Error::PeerFailed { peer, .. } if peer.rank == failing), "{error}");
        }
    }
}

pub fn a_peer_that_left_is_named(make: Make) {
    let results = at_once(|| {
        members(make, 2, |world, group| {
            if world.rank() == 0 {
                return None;
            }
            Some(fatal(group.recv(&mut [0_u8; 3], 0)))
        })
    });
    for error in results.into_iter().flatten() {
        assert!(matches!(&error, Error::PeerLeft { peer, .. } if peer.rank == 0), "{error}");
        assert!(error.to_string().contains("recv #0 from rank 0 of group 1 (u8, 3 elements)"), "{error}");
    }
}
