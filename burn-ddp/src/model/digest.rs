//! Digests of values, and the parameters in which the ranks' digests differ.

use std::cmp::Reverse;
use std::fmt::{self, Display, Formatter};

use super::parameter_movement::{Movement, distance};
use crate::Error;
use crate::agreement::list_ranks;

/// Digest of a value; never 0, which stands for "not read".
pub(crate) fn digest(bytes: &[u8]) -> i64 {
    (xxhash_rust::xxh3::xxh3_64(bytes) as i64 & i64::MAX).max(1)
}

/// Parameters in which ranks differ by rounding.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rounding {
    /// Number of parameters.
    pub parameters: usize,
    /// Path of the parameter in which the ranks differ most.
    pub worst: String,
    /// Difference of the ranks' movements, relative to the smaller movement; 0 if only last bits differ.
    pub distance: f64,
}

impl Display for Rounding {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Rounding { worst, distance, parameters } = self;
        let more = and_more(parameters - 1);
        if *distance == 0.0 {
            return write!(f, "{worst}{more} differs between ranks by last bits of its values");
        }
        write!(f, "{worst}{more} differs between ranks by {distance:.0e} of its movement")
    }
}

/// A comparison of the ranks' parameters.
pub(crate) struct Comparison<'a> {
    pub paths: &'a [&'a str],
    /// The ranks that are compared, by their numbers in the job.
    pub ranks: &'a [usize],
    /// `digests[n][i]` is the digest of `paths[i]` on `ranks[n]`; 0 if that rank did not read the parameter, which is
    /// then not compared there.
    pub digests: &'a [Vec<i64>],
    /// Step of the comparison; `None` outside of a step.
    pub step: Option<u64>,
}

impl Comparison<'_> {
    /// Compares bit by bit.
    ///
    /// # Errors
    ///
    /// [`Error::ReplicasDiffer`] with the first parameter whose digests differ, and its ranks.
    pub(crate) fn exactly(&self) -> Result<(), Error> {
        let differing = differing(self.digests);
        let Some(&first) = differing.first() else { return Ok(()) };
        Err(self.difference(first, differing.len(), "", |one, other| self.equal(first, one, other)))
    }

    /// Compares the [movements](Movement) of the parameters that are [`differing`]: `movements[rank][n]` is of the n-th
    /// of them. Returns the rounding in which the ranks differ, if they do. `tolerances[i]` is that of `paths[i]`.
    ///
    /// # Errors
    ///
    /// [`Error::ReplicasDiffer`] with the first parameter that differs by more than rounding, and its ranks.
    pub(crate) fn by_movement(
        &self,
        movements: &[Vec<Movement>],
        tolerances: &[f64],
    ) -> Result<Option<Rounding>, Error> {
        let differing = differing(self.digests);
        let apart = |nth: usize, one: usize, other: usize| distance(&movements[one][nth], &movements[other][nth]);
        let mut worst: Option<(usize, f64)> = None;
        let mut beyond = Vec::new();
        for (nth, &i) in differing.iter().enumerate() {
            let first = self.votes(i).next().map_or(0, |(rank, _)| rank);
            let farthest = self.votes(i).map(|(rank, _)| apart(nth, first, rank)).fold(0.0, f64::max);
            if farthest > tolerances[i] {
                beyond.push((nth, i, farthest));
            }
            if worst.is_none_or(|(_, most)| farthest > most) {
                worst = Some((i, farthest));
            }
        }
        if let Some(&(nth, i, farthest)) = beyond.first() {
            let by = match farthest.is_finite() {
                true => format!(" by {farthest:.1e} of its movement (rounding: up to {:.0e})", tolerances[i]),
                false => ", and has not moved since the last comparison".to_owned(),
            };
            let alike = |one, other| self.equal(i, one, other) || apart(nth, one, other) <= tolerances[i];
            return Err(self.difference(i, beyond.len(), &by, alike));
        }
        let rounding = |(i, distance): (usize, f64)| {
            let worst = self.paths[i].to_owned();
            Rounding { parameters: differing.len(), worst, distance }
        };
        Ok(worst.map(rounding))
    }

    /// Ranks that read the `i`-th parameter, and their digests.
    fn votes(&self, i: usize) -> impl Iterator<Item = (usize, i64)> {
        votes(self.digests, i)
    }

    fn equal(&self, i: usize, one: usize, other: usize) -> bool {
        self.digests[one][i] == self.digests[other][i]
    }

    /// The error of the `i`-th parameter, the first of `parameters` that differ, and `by` how much. Names the ranks
    /// that are not `alike` most others.
    fn difference(&self, i: usize, parameters: usize, by: &str, alike: impl Fn(usize, usize) -> bool) -> Error {
        let voters: Vec<usize> = self.votes(i).map(|(rank, _)| rank).collect();
        let friends = |rank: usize| voters.iter().filter(|&&other| alike(rank, other)).count();
        let common = voters.iter().copied().max_by_key(|&rank| (friends(rank), Reverse(rank))).unwrap_or_default();
        let has_majority = 2 * friends(common) > voters.len();
        let odd = |rank: &usize| !has_majority || !alike(common, *rank);
        let ranks: Vec<usize> = voters.iter().copied().filter(odd).map(|nth| self.ranks[nth]).collect();
        let (parameter, more) = (self.paths[i].to_owned(), and_more(parameters - 1));
        let difference = if has_majority {
            format!("{parameter}{more} on {} differs from the other ranks{by}", list_ranks(&ranks))
        } else {
            format!("{parameter}{more} differs between {}{by}", list_ranks(&ranks))
        };
        Error::ReplicasDiffer { step: self.step, parameter, ranks, difference }
    }
}

/// Ranks that read the `i`-th parameter, and their digests.
fn votes(digests: &[Vec<i64>], i: usize) -> impl Iterator<Item = (usize, i64)> {
    digests.iter().enumerate().filter_map(move |(rank, d)| Some((rank, *d.get(i)?))).filter(|(_, d)| *d != 0)
}

/// Parameters whose digests differ between ranks that read them: the same on all ranks.
pub(crate) fn differing(digests: &[Vec<i64>]) -> Vec<usize> {
    let differs = |i: &usize| {
        let mut read = votes(digests, *i).map(|(_, d)| d);
        read.next().is_some_and(|first| read.any(|d| d != first))
    };
    (0..digests.first().map_or(0, Vec::len)).filter(differs).collect()
}

fn and_more(parameters: usize) -> String {
    match parameters {
        0 => String::new(),
        1 => " (and 1 more parameter)".to_string(),
        n => format!(" (and {n} more parameters)"),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::model::parameter_movement::Sketch;

    #[test]
    fn a_digest_sees_one_bit_and_is_never_zero() {
        let mut value = 1.0_f32.to_le_bytes();
        let before = digest(&value);
        value[0] ^= 1;
        assert_ne!(digest(&value), before);
        assert!(before > 0 && digest(&[]) > 0);
    }

    fn difference(paths: &[&str], digests: &[Vec<i64>]) -> Option<(Vec<usize>, String)> {
        match (Comparison { paths, ranks: &[0, 1, 2], digests, step: None }).exactly() {
            Ok(()) => None,
            Err(Error::ReplicasDiffer { ranks, difference, .. }) => Some((ranks, difference)),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn the_odd_rank_is_named() {
        let paths = ["a", "b", "c"];
        assert_eq!(difference(&paths, &[vec![1, 2, 3], vec![1, 2, 3]]), None);
        let (ranks, text) = difference(&paths, &[vec![1, 2, 3], vec![1, 9, 3], vec![1, 2, 3]]).unwrap();
        assert_eq!((ranks.as_slice(), text.as_str()), (&[1][..], "b on rank 1 differs from the other ranks"));
        let (ranks, text) = difference(&paths, &[vec![7, 2, 9], vec![1, 2, 3], vec![1, 2, 3]]).unwrap();
        assert_eq!(ranks, [0]);
        assert_eq!(text, "a (and 1 more parameter) on rank 0 differs from the other ranks");
        let (ranks, text) = difference(&paths, &[vec![1, 2, 3], vec![1, 2, 4]]).unwrap();
        assert_eq!((ranks.as_slice(), text.as_str()), (&[0, 1][..], "c differs between ranks 0, 1"));
    }

    #[test]
    fn a_rank_that_did_not_read_has_no_say() {
        let paths = ["a"];
        assert_eq!(difference(&paths, &[vec![0], vec![4], vec![4]]), None);
        assert_eq!(difference(&paths, &[]), None);
        let (_, text) = difference(&paths, &[vec![0], vec![4], vec![5]]).unwrap();
        assert_eq!(text, "a differs between ranks 1, 2");
    }

    #[test]
    fn the_step_is_named() {
        let digests = [vec![1], vec![2], vec![1]];
        let comparison = Comparison { paths: &["a.weight"], ranks: &[0, 1, 2, 3], digests: &digests, step: Some(200) };
        let error = comparison.exactly().unwrap_err().to_string();
        assert!(error.starts_with("the replicas differ in step 200: a.weight on rank 1 differs from the other ranks"));
    }

    /// Movement of a parameter of two elements.
    fn moved(x: f32, y: f32) -> Movement {
        Movement::first(Sketch::of(&TensorData::from([x, y])))
    }

    fn by_movement(movements: &[Movement]) -> Result<Option<Rounding>, Error> {
        let digests: Vec<Vec<i64>> = (1..=movements.len() as i64).map(|rank| vec![7, rank]).collect();
        let movements: Vec<Vec<Movement>> = movements.iter().map(|movement| vec![*movement]).collect();
        let comparison = Comparison { paths: &["a", "b"], ranks: &[0, 1, 2, 3], digests: &digests, step: Some(100) };
        comparison.by_movement(&movements, &[0.0, 1e-3])
    }

    #[test]
    fn rounding_is_told_from_more() {
        let rounding = by_movement(&[moved(1.0, 1.0), moved(1.0, 1.000_01), moved(1.000_02, 1.0)]).unwrap().unwrap();
        assert_eq!((rounding.parameters, rounding.worst.as_str()), (1, "b"));
        assert!((1e-6..1e-4).contains(&rounding.distance), "{rounding:?}");
        assert_eq!(rounding.to_string(), "b differs between ranks by 1e-5 of its movement");
        assert_eq!(
            by_movement(&[moved(1.01, 1.01), moved(1.0, 1.000_01), moved(1.0, 1.0)])
                .unwrap_err()
                .to_string()
                .split(';')
                .next()
                .unwrap(),
            "the replicas differ in step 100: b on rank 0 differs from the other ranks by 1.0e-2 of its movement \
            (rounding: up to 1e-3)"
        );
        let still = by_movement(&[moved(1.0, 0.0), moved(0.0, 0.0)]).unwrap_err().to_string();
        assert!(still.contains("b differs between ranks 0, 1, and has not moved"), "{still}");
        assert!(by_movement(&[Movement::UNKNOWN, Movement::UNKNOWN]).is_err());
    }

    #[test]
    fn a_rank_that_did_not_read_has_no_movement_to_compare() {
        let digests = [vec![0], vec![4], vec![5]];
        let comparison = Comparison { paths: &["a"], ranks: &[0, 1, 2, 3], digests: &digests, step: None };
        let movements = [Movement::UNKNOWN, moved(1.0, 2.0), moved(1.0, 2.000_001)].map(|movement| vec![movement]);
        assert!(comparison.by_movement(&movements, &[1e-3]).unwrap().is_some());
    }
}
