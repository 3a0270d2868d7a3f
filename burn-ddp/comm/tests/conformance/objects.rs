//! Collectives of objects: values of any type that serde knows.

use burn_ddp_comm::Error;
use serde::{Deserialize, Serialize};

use crate::harness::{Make, at_once, fatal, groups, refused};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Report {
    rank: usize,
    name: String,
    losses: Vec<f64>,
    best: Option<(u64, f32)>,
}

fn report(rank: usize) -> Report {
    let best = (rank % 2 == 1).then_some((rank as u64, 0.5));
    Report { rank, name: "ü".repeat(rank * 1000), losses: vec![0.1; rank * 37], best }
}

pub fn objects_of_different_sizes(make: Make) {
    for n in [1, 2, 3, 7] {
        groups(make, n, |group| {
            let all: Vec<Report> = (0..n).map(report).collect();
            assert_eq!(group.all_gather_object(&report(group.rank())).unwrap(), all);
            for root in 0..n {
                // What others pass is dropped.
                let mine = (root % 2 == 0 || group.rank() == root).then(|| report(group.rank()));
                assert_eq!(group.broadcast_object(mine, root).unwrap(), report(root));
            }
            assert_eq!(group.all_gather_object(&()).unwrap(), vec![(); n]);
        });
    }
}

pub fn large_objects(make: Make) {
    groups(make, 2, |group| {
        let mine = vec![group.rank() as u8; (group.rank() + 1) * 3_000_000];
        let all = group.all_gather_object(&mine).unwrap();
        assert!(all[group.rank()] == mine && all[0].len() == 3_000_000 && all[1].len() == 6_000_000);
        assert!(all[1].iter().all(|x| *x == 1));
    });
}

/// Refuses to be encoded on one rank.
#[derive(Debug, Deserialize)]
struct Stubborn(usize);

impl Serialize for Stubborn {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            1 => Err(serde::ser::Error::custom("not today")),
            rank => (rank as u64).serialize(serializer),
        }
    }
}

pub fn objects_that_cannot_travel_are_refused_by_all(make: Make) {
    groups(make, 3, |group| {
        let error = refused(group.all_gather_object(&Stubborn(group.rank())));
        assert_eq!(error.rank(), Some(1), "{error}");
        let error = refused(group.broadcast_object(Some(Stubborn(group.rank())), 1));
        assert_eq!(error.rank(), Some(1), "{error}");
        let error = refused(group.broadcast_object(None::<String>, 2));
        assert_eq!(error.rank(), Some(2), "{error}");
        assert_eq!(group.rank() == 2, error.to_string().contains("None"), "{error}");
        assert_eq!(group.broadcast_object(Some(Stubborn(group.rank())), 2).unwrap().0, 2);
    });
}

pub fn objects_of_different_types_are_an_error(make: Make) {
    let errors = at_once(|| {
        groups(make, 2, |group| match group.rank() {
            0 => group.broadcast_object(Some(vec![7_u8; 3]), 0).map(drop).and_then(|()| group.barrier()),
            _ => group.broadcast_object(None::<u8>, 0).map(drop),
        })
    });
    for error in errors.into_iter().map(fatal) {
        assert!(matches!(error, Error::Object { rank: 1, from: 0, .. }), "{error}");
    }
}
