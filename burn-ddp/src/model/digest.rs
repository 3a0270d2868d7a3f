//! Whether all ranks still hold the same parameters.

/// A digest of a value; never 0, which stands for "not read".
pub(crate) fn digest(bytes: &[u8]) -> i64 {
    (xxhash_rust::xxh3::xxh3_64(bytes) as i64 & i64::MAX).max(1)
}

/// Says the first parameter whose digests differ, and on which ranks; `digests[rank][i]` is of `paths[i]`. Ranks that did not read it have no say.
pub(crate) fn difference(paths: &[&str], digests: &[Vec<i64>]) -> Option<String> {
    let of = |i: usize| digests.iter().enumerate().filter_map(move |(rank, d)| Some((rank, *d.get(i)?)));
    let differing: Vec<usize> = (0..paths.len())
        .filter(|&i| {
            let mut read = of(i).map(|(_, d)| d).filter(|d| *d != 0);
            read.next().is_some_and(|first| read.any(|d| d != first))
        })
        .collect();
    let first = *differing.first()?;
    let votes: Vec<(usize, i64)> = of(first).filter(|(_, d)| *d != 0).collect();
    let count = |digest: i64| votes.iter().filter(|(_, d)| *d == digest).count();
    let (_, common) = *votes.iter().max_by_key(|(rank, d)| (count(*d), std::cmp::Reverse(*rank)))?;
    let odd: Vec<String> = votes.iter().filter(|(_, d)| *d != common).map(|(rank, _)| rank.to_string()).collect();
    let path = paths[first];
    let who = match (odd.as_slice(), 2 * count(common) > votes.len()) {
        ([one], true) => format!("rank {one} holds another value than the other ranks"),
        (several, true) => format!("ranks {} hold other values than the other ranks", several.join(", ")),
        _ => {
            let all: Vec<String> = votes.iter().map(|(rank, _)| rank.to_string()).collect();
            format!("ranks {} hold different values", all.join(" and "))
        }
    };
    let more = match differing.len() - 1 {
        0 => String::new(),
        1 => " (and 1 more parameter)".to_string(),
        n => format!(" (and {n} more parameters)"),
    };
    Some(format!("{path}{more}: {who}"))
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

    #[test]
    fn the_odd_rank_is_named() {
        let paths = ["a", "b", "c"];
        assert_eq!(difference(&paths, &[vec![1, 2, 3], vec![1, 2, 3]]), None);
        let text = difference(&paths, &[vec![1, 2, 3], vec![1, 9, 3], vec![1, 2, 3]]).unwrap();
        assert_eq!(text, "b: rank 1 holds another value than the other ranks");
        let text = difference(&paths, &[vec![7, 2, 9], vec![1, 2, 3], vec![1, 2, 3]]).unwrap();
        assert_eq!(text, "a (and 1 more parameter): rank 0 holds another value than the other ranks");
        let text = difference(&paths, &[vec![1, 2, 3], vec![1, 2, 4]]).unwrap();
        assert_eq!(text, "c: ranks 0 and 1 hold different values");
    }

    #[test]
    fn who_did_not_read_has_no_say() {
        let paths = ["a"];
        assert_eq!(difference(&paths, &[vec![0], vec![4], vec![4]]), None);
        assert_eq!(difference(&paths, &[]), None);
        let text = difference(&paths, &[vec![0], vec![4], vec![5]]).unwrap();
        assert_eq!(text, "a: ranks 1 and 2 hold different values");
    }
}
