//! The arithmetic of burn-ddp's host engines: a balanced binary tree over the ranks, f32 for halves, one rounding.

use half::{bf16, f16};

/// Operator that combines the ranks' elements.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    Sum,
    Product,
    Max,
    Min,
    Mean,
    /// Sum of scaled elements, with each rank's factor as an element.
    Scaled(Vec<[u8; 8]>),
}

impl Kind {
    pub(super) fn of(code: i32) -> Option<Kind> {
        [Kind::Sum, Kind::Product, Kind::Max, Kind::Min, Kind::Mean].into_iter().nth(usize::try_from(code).ok()?)
    }
}

/// Bytes of an element of NCCL's type.
pub(super) fn size_of_code(dtype: i32) -> Option<usize> {
    Some(match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return None,
    })
}

fn tree<A: Copy>(mut level: Vec<A>, fold: impl Fn(A, A) -> A) -> A {
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| if let [a, b] = pair { fold(*a, *b) } else { pair[0] }).collect();
    }
    level[0]
}

trait Lane: Copy {
    const SIZE: usize;
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn reduce(kind: &Kind, lanes: Vec<Self>) -> Self;
}

macro_rules! floats {
    ($($ty:ty as $acc:ty: $widen:expr, $narrow:expr;)*) => {$(
        impl Lane for $ty {
            const SIZE: usize = size_of::<$ty>();

            fn read(bytes: &[u8]) -> Self {
                <$ty>::from_le_bytes(bytes.try_into().expect("an element"))
            }

            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }

            fn reduce(kind: &Kind, lanes: Vec<Self>) -> Self {
                let wide: Vec<$acc> = lanes.iter().map(|lane| $widen(*lane)).collect();
                let count = wide.len() as $acc;
                let nan = |a: $acc, b: $acc| a.is_nan() || b.is_nan();
                $narrow(match kind {
                    Kind::Sum => tree(wide, |a, b| a + b),
                    Kind::Mean => tree(wide, |a, b| a + b) / count,
                    Kind::Product => tree(wide, |a, b| a * b),
                    Kind::Min => tree(wide, |a, b| if nan(a, b) { <$acc>::NAN } else { a.min(b) }),
                    Kind::Max => tree(wide, |a, b| if nan(a, b) { <$acc>::NAN } else { a.max(b) }),
                    Kind::Scaled(factors) => {
                        let factor = |bytes: &[u8; 8]| $widen(<$ty>::read(&bytes[..Self::SIZE]));
                        let scaled = wide.iter().zip(factors).map(|(x, bytes)| *x * factor(bytes)).collect();
                        tree(scaled, |a: $acc, b| a + b)
                    }
                })
            }
        }
    )*};
}

floats! {
    f64 as f64: |x: f64| x, |x: f64| x;
    f32 as f32: |x: f32| x, |x: f32| x;
    f16 as f32: f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32;
}

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Lane for $ty {
            const SIZE: usize = size_of::<$ty>();

            fn read(bytes: &[u8]) -> Self {
                <$ty>::from_le_bytes(bytes.try_into().expect("an element"))
            }

            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }

            fn reduce(kind: &Kind, lanes: Vec<Self>) -> Self {
                match kind {
                    Kind::Product => tree(lanes, <$ty>::wrapping_mul),
                    Kind::Max => tree(lanes, <$ty>::max),
                    Kind::Min => tree(lanes, <$ty>::min),
                    _ => tree(lanes, <$ty>::wrapping_add),
                }
            }
        }
    )*};
}

integers!(i8, u8, i32, i64);

/// Reduces the rows of all ranks, all of one length.
pub(super) fn reduce(dtype: i32, kind: &Kind, rows: &[&[u8]]) -> Vec<u8> {
    fn lanes<T: Lane>(kind: &Kind, rows: &[&[u8]]) -> Vec<u8> {
        let mut out = vec![0; rows[0].len()];
        for (nth, element) in out.chunks_exact_mut(T::SIZE).enumerate() {
            let read = |row: &&[u8]| T::read(&row[nth * T::SIZE..][..T::SIZE]);
            T::reduce(kind, rows.iter().map(read).collect()).write(element);
        }
        out
    }
    match dtype {
        0 => lanes::<i8>(kind, rows),
        2 => lanes::<i32>(kind, rows),
        4 => lanes::<i64>(kind, rows),
        6 => lanes::<f16>(kind, rows),
        7 => lanes::<f32>(kind, rows),
        8 => lanes::<f64>(kind, rows),
        9 => lanes::<bf16>(kind, rows),
        _ => lanes::<u8>(kind, rows),
    }
}
