//! A permutation that is the same for ever: in every process, on every platform, in every release.
//!
//! A checkpoint holds (seed, epoch, step) and no list of items, so a resumed run sees each item once only if the
//! order never changes. Hence nothing here depends on `rand`'s distributions, whose results may change between
//! releases: the stream is ChaCha8 by its definition, and the bounded draw and the shuffle are written out.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Separates this use of a seed from any other.
const DOMAIN: &[u8; 16] = b"burn-ddp/shuffle";

/// A permutation of `0..n` that depends on `n`, `seed` and `epoch` only.
///
/// All `n!` orders are equally likely, as far as ChaCha8 with an all-zero nonce and the key `seed ‖ epoch ‖ domain`
/// is random. `n` words of memory and `n` draws.
///
/// ```
/// use burn_ddp::data::permutation;
///
/// let order = permutation(10, 42, 0);
/// assert_eq!(order, permutation(10, 42, 0));
/// assert_ne!(order, permutation(10, 42, 1));
///
/// let mut items = order;
/// items.sort();
/// assert_eq!(items, (0..10).collect::<Vec<_>>());
/// ```
pub fn permutation(n: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut next = stream(seed, epoch, DOMAIN);
    let mut order: Vec<usize> = (0..n).collect();
    for last in (1..n).rev() {
        let drawn = below(last as u64 + 1, &mut next);
        order.swap(last, drawn as usize);
    }
    order
}

/// Random words that depend on `seed`, `epoch` and the `domain` of their use only.
pub(super) fn stream(seed: u64, epoch: u64, domain: &[u8; 16]) -> impl FnMut() -> u64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    key[16..].copy_from_slice(domain);
    let mut rng = ChaCha8Rng::from_seed(key);
    move || rng.next_u64()
}

/// A uniform number in `0..bound`, by Lemire's multiplication with rejection: no modulo bias at any bound.
fn below(bound: u64, mut next: impl FnMut() -> u64) -> u64 {
    let mut wide = u128::from(next()) * u128::from(bound);
    if (wide as u64) < bound {
        let rejected = bound.wrapping_neg() % bound;
        while (wide as u64) < rejected {
            wide = u128::from(next()) * u128::from(bound);
        }
    }
    (wide >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Written by `tests/permutation_golden.py`, which has its own ChaCha8: `n seed epoch: order…`.
    const GOLDEN: &str = include_str!("tests/permutation_golden.txt");

    #[test]
    fn never_changes() {
        let mut lines = 0;
        for line in GOLDEN.lines().filter(|line| !line.starts_with('#')) {
            let (arguments, order) = line.split_once(':').unwrap();
            let arguments: Vec<u64> = arguments.split_whitespace().map(|word| word.parse().unwrap()).collect();
            let order: Vec<usize> = order.split_whitespace().map(|word| word.parse().unwrap()).collect();
            let [n, seed, epoch] = arguments[..] else { panic!("{line}") };
            assert_eq!(permutation(n as usize, seed, epoch), order, "n {n}, seed {seed}, epoch {epoch}");
            lines += 1;
        }
        assert_eq!(lines, 9);
    }

    #[test]
    fn bounded_draws_reject_exactly_the_biased_ones() {
        // Bound 3: 2^64 = 1 (mod 3), so exactly the draw with low word 0 is rejected.
        let mut draws = [0, u64::MAX].into_iter();
        assert_eq!(below(3, || draws.next().unwrap()), 2);
        assert_eq!(draws.next(), None);
        // A power of two rejects nothing.
        let mut draws = [0].into_iter();
        assert_eq!(below(4, || draws.next().unwrap()), 0);
        // Bound 2^63 + 1 rejects almost half of all draws; the accepted ones stay below it.
        let bound = (1 << 63) + 1;
        let mut draws = [1, u64::MAX].into_iter();
        assert_eq!(below(bound, || draws.next().unwrap()), 0);
        let mut draws = [0, u64::MAX].into_iter();
        assert_eq!(below(bound, || draws.next().unwrap()), bound - 1);
    }

    #[test]
    fn every_order_is_about_equally_likely() {
        let mut counts = std::collections::HashMap::new();
        for epoch in 0..24_000 {
            *counts.entry(permutation(4, 7, epoch)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 24);
        // 1000 expected each; six standard deviations are 186.
        for (order, count) in counts {
            assert!((814..=1186).contains(&count), "{order:?}: {count}");
        }
    }

    proptest! {
        #[test]
        fn is_a_permutation(n in 0usize..2000, seed: u64, epoch: u64) {
            let mut order = permutation(n, seed, epoch);
            order.sort_unstable();
            prop_assert_eq!(order, (0..n).collect::<Vec<_>>());
        }

        #[test]
        fn seed_and_epoch_both_count(seed: u64, epoch: u64) {
            let order = permutation(64, seed, epoch);
            prop_assert_ne!(&order, &permutation(64, seed, epoch ^ 1));
            prop_assert_ne!(&order, &permutation(64, seed ^ 1, epoch));
            prop_assert!(seed == epoch || order != permutation(64, epoch, seed));
        }
    }
}
