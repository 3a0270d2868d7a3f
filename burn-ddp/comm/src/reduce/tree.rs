//! The balanced tree over the sources, in rank order: neighbours pair up, an odd last one is carried up, and the same
//! again over the results, until one is left.
//!
//! A pass over memory folds the tree of up to [`MAX_SOURCES`] sources at once, so its groups are whole subtrees: their
//! size is a power of two.

use std::ops::Range;

/// Sources of one pass at most.
pub(super) const MAX_SOURCES: usize = 4;

/// The sources of subtree `nth`, of `count` sources in subtrees of `arity`.
#[inline]
pub(super) fn subtree(nth: usize, arity: usize, count: usize) -> Range<usize> {
    nth * arity..count.min((nth + 1) * arity)
}

/// The two subtrees of the subtree of `places`, of which there are at least two.
pub(crate) fn halves(places: Range<usize>) -> (Range<usize>, Range<usize>) {
    let middle = places.start + places.len().next_power_of_two() / 2;
    (places.start..middle, middle..places.end)
}

/// Folds the array `$x` of `$len` elements along the tree, and yields what is left. A macro, so that `$fold` is part of
/// the loop that has the vector instructions.
macro_rules! fold_tree {
    ($x:ident, $len:expr, |$left:ident, $right:ident| $fold:expr) => {{
        let mut len = $len;
        while len > 1 {
            for nth in 0..len / 2 {
                let ($left, $right) = ($x[2 * nth], $x[2 * nth + 1]);
                $x[nth] = $fold;
            }
            if len % 2 == 1 {
                $x[len / 2] = $x[len - 1];
            }
            len = len.div_ceil(2);
        }
        $x[0]
    }};
}

/// Runs `$body` with the slice `$slice` as the array `$array`, of any length up to [`MAX_SOURCES`].
macro_rules! with_array {
    ($slice:expr, |$array:ident: $ty:ty| $body:expr) => {
        match $slice.len() {
            1 => with_array!(@ $slice, 1, $array: $ty, $body),
            2 => with_array!(@ $slice, 2, $array: $ty, $body),
            3 => with_array!(@ $slice, 3, $array: $ty, $body),
            4 => with_array!(@ $slice, 4, $array: $ty, $body),
            _ => {}
        }
    };
    (@ $slice:expr, $len:literal, $array:ident: $ty:ty, $body:expr) => {
        if let Some($array) = $slice.first_chunk::<$len>() {
            let $array: &[$ty; $len] = $array;
            $body
        }
    };
}

pub(super) use {fold_tree, with_array};
