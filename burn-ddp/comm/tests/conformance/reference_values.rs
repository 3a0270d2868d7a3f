//! Values that say where they come from, and the definition of a reduction, written down a second time.

use burn_ddp_comm::{Element, ReduceOp};
use half::{bf16, f16};

/// An element type with test values and the definition of its reductions.
pub trait Sample: Element + std::fmt::Debug {
    /// Element `index` of rank `rank`. Swapped ranks or shifted indices change results.
    fn sample(rank: usize, index: usize) -> Self;
    /// What `values`, one per rank, become.
    fn expected(op: ReduceOp, values: &[Self]) -> Self;
    fn bits(self) -> u64;
}

/// Pairs up neighbours, left with right, until one is left.
pub fn tree<A: Copy>(mut level: Vec<A>, fold: impl Fn(A, A) -> A) -> A {
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| if let [a, b] = pair { fold(*a, *b) } else { pair[0] }).collect();
    }
    level[0]
}

/// Small and large numbers of both signs that no short sum represents exactly: the order of additions shows.
fn number(rank: usize, index: usize) -> f64 {
    let mixed = (rank as u64 * 1_000_003 + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let magnitude = [0.001, 0.7, 1.0, 37.0][(index + rank) % 4];
    (mixed as f64 / f64::from(1 << 24) - 0.5) * magnitude + 0.01 * rank as f64
}

macro_rules! floats {
    ($($ty:ty as $acc:ty: $from_f64:expr, $widen:expr, $narrow:expr;)*) => {$(
        impl Sample for $ty {
            fn sample(rank: usize, index: usize) -> Self {
                $from_f64(number(rank, index))
            }

            fn expected(op: ReduceOp, values: &[Self]) -> Self {
                let wide: Vec<$acc> = values.iter().map(|x| $widen(*x)).collect();
                let count = wide.len() as $acc;
                $narrow(match op {
                    ReduceOp::Sum => tree(wide, |a, b| a + b),
                    ReduceOp::Mean => tree(wide, |a, b| a + b) / count,
                    ReduceOp::Product => tree(wide, |a, b| a * b),
                    ReduceOp::Min => wide.into_iter().reduce(<$acc>::min).unwrap(),
                    ReduceOp::Max => wide.into_iter().reduce(<$acc>::max).unwrap(),
                })
            }

            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    )*};
}

floats! {
    f64 as f64: |x: f64| x, |x: f64| x, |x: f64| x;
    f32 as f32: |x: f64| x as f32, |x: f32| x, |x: f32| x;
    f16 as f32: f16::from_f64, f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::from_f64, bf16::to_f32, bf16::from_f32;
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Sample for $ty {
            fn sample(rank: usize, index: usize) -> Self {
                (index as i64).wrapping_mul(31).wrapping_add(rank as i64 * 1_000_003).wrapping_sub(77) as $ty
            }

            fn expected(op: ReduceOp, values: &[Self]) -> Self {
                let values = values.iter().copied();
                match op {
                    ReduceOp::Sum => values.fold(0, <$ty>::wrapping_add),
                    ReduceOp::Product => values.fold(1, <$ty>::wrapping_mul),
                    ReduceOp::Min => values.min().unwrap(),
                    ReduceOp::Max => values.max().unwrap(),
                    ReduceOp::Mean => unreachable!("refused"),
                }
            }

            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}

integers!(i64, i32, i8, u8);

impl Sample for bool {
    fn sample(rank: usize, index: usize) -> Self {
        (index >> (rank % 3)) % 2 == 1
    }

    fn expected(op: ReduceOp, values: &[Self]) -> Self {
        match op {
            ReduceOp::Min => values.iter().all(|x| *x),
            ReduceOp::Max => values.iter().any(|x| *x),
            _ => unreachable!("refused"),
        }
    }

    fn bits(self) -> u64 {
        u64::from(self)
    }
}

/// `len` elements of `rank`, starting at index `start`.
pub fn samples<T: Sample>(rank: usize, start: usize, len: usize) -> Vec<T> {
    (start..start + len).map(|index| T::sample(rank, index)).collect()
}

/// Fails unless `got` are the bits of `expected(index)`.
pub fn assert_bits<T: Sample>(got: &[T], expected: impl Fn(usize) -> T, what: impl Fn() -> String) {
    for (index, got) in got.iter().enumerate() {
        let expected = expected(index);
        assert_eq!(got.bits(), expected.bits(), "{}: element {index} is {got:?}, expected {expected:?}", what());
    }
}

/// The defined ops of a type.
pub fn ops<T: Element>() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE))
}

/// Runs a statement for each element type, named `$t` in it.
macro_rules! for_each_dtype {
    ($t:ident => $body:expr) => {{
        {
            type $t = f64;
            $body;
        }
        {
            type $t = f32;
            $body;
        }
        {
            type $t = half::f16;
            $body;
        }
        {
            type $t = half::bf16;
            $body;
        }
        {
            type $t = i64;
            $body;
        }
        {
            type $t = i32;
            $body;
        }
        {
            type $t = i8;
            $body;
        }
        {
            type $t = u8;
            $body;
        }
        {
            type $t = bool;
            $body;
        }
    }};
}
pub(crate) use for_each_dtype;
