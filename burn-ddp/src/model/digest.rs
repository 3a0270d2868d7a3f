//! Digests of values, and the parameters in which the ranks' digests differ.

use crate::Error;
use crate::agreement::list_ranks;

/// Digest of a value; never 0, which stands for "not read".
pub(crate) fn digest(bytes: &[u8]) -> i64 {
    (xxhash_rust::xxh3::xxh3_64(bytes) as i64 & i64::MAX).max(1)
}

/// Compares the digests of all ranks, where `digests[rank][i]` is of `paths[i]`. Ranks that did not read a parameter
/// (digest 0) have no say.
///
/// # Errors
///
/// [`Error::ReplicasDiffer`] with the first parameter whose digests differ, and its ranks.
pub(crate) fn compare(paths: &[&str], digests: &[Vec<i64>], step: Option<u64>) -> Result<(), Error> {
    let of = |i: usize| digests.iter().enumerate().filter_map(move |(rank, d)| Some((rank, *d.get(i)?)));
    let differing: Vec<usize> = (0..paths.len())
        .filter(|&i| {
            let mut read = of(i).map(|(_, d)| d).filter(|d| *d != 0);
            read.next().is_some_and(|first| read.any(|d| d != first))
        })
        .collect();
    let Some(&first) = differing.first() else { return Ok(()) };
    let votes: Vec<(usize, i64)> = of(first).filter(|(_, d)| *d != 0).collect();
    let count = |digest: i64| votes.iter().filter(|(_, d)| *d == digest).count();
    let common = votes.iter().max_by_key(|(rank, d)| (count(*d), std::cmp::Reverse(*rank))).map_or(0, |(_, d)| *d);
    let parameter = paths[first].to_string();
    let more = match differing.len() - 1 {
        0 => String::new(),
        1 => " (and 1 more parameter)".to_string(),
        n => format!(" (and {n} more parameters)"),
    };
    let has_majority = 2 * count(common) > votes.len();
    let ranks: Vec<usize> =
        votes.iter().filter(|(_, d)| !has_majority || *d != common).map(|(rank, _)| *rank).collect();
    let difference = if has_majority {
        format!("{parameter}{more} on {} differs from the other ranks", list_ranks(&ranks))
    } else {
        format!("{parameter}{more} differs between {}", list_ranks(&ranks))
    };
    Err(Error::ReplicasDiffer { step, parameter, ranks, difference })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_sees_one_bit_and_is_never_zero() {
        let mut value = 1.0_f32.to_le_bytes();
        let before = digest(&value);
        value[0] ^= 1;
        assert_ne!(digest(&value), before);
        assert!(before > 0 && digest(&[]) > 0);
    }

    fn difference(paths: &[&str], digests: &[Vec<i64>]) -> Option<(Vec<usize>, String)> {
        match compare(paths, digests, None) {
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
        let error = compare(&["a.weight"], &[vec![1], vec![2], vec![1]], Some(200)).unwrap_err().to_string();
        assert!(error.starts_with("the replicas differ in step 200: a.weight on rank 1 differs from the other ranks"));
    }
}
