//! Type of a collective's elements, and the shape of the tensor that they are.

use std::fmt;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::DType;

/// Type of the elements in a buffer of bytes and, if they are a tensor, its shape. A [`DType`] converts to it.
///
/// Ranks compare shapes like the other arguments of a call. They compare also whether there is a shape at all.
///
/// # Example
///
/// ```
/// use burn_ddp_comm::{DType, ReduceOp, TensorType, World};
///
/// let errors = World::spawn(2, |world| {
///     let group = world.group().unwrap();
///     let tensor = TensorType::new(DType::F32, [&[2, 3], &[3, 2]][world.rank()]); // as many elements
///     group.all_reduce_bytes(tensor, &mut [0; 24], ReduceOp::Sum, 0).unwrap_err().to_string()
/// });
/// assert!(errors.iter().all(|e| e.contains("shape [2, 3]") && e.contains("shape [3, 2]")), "{errors:?}");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// Type of the elements.
    pub dtype: DType,
    /// Shape of the tensor, if the elements are one.
    pub shape: Option<Shape>,
}

impl TensorType {
    /// A tensor of this shape.
    pub fn new(dtype: DType, dims: &[usize]) -> TensorType {
        TensorType { dtype, shape: Some(Shape::of(dims)) }
    }
}

impl From<DType> for TensorType {
    fn from(dtype: DType) -> TensorType {
        TensorType { dtype, shape: None }
    }
}

/// Shape of a tensor in 64 bits: the sizes of its dimensions as octal digits, or a hash if there are more than 15
/// digits.
///
/// # Example
///
/// ```
/// use burn_ddp_comm::Shape;
///
/// assert_eq!(Shape::of(&[64, 3, 224, 224]).to_string(), "[64, 3, 224, 224]");
/// assert_ne!(Shape::of(&[6]), Shape::of(&[2, 3]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape(NonZeroU64);

/// The highest bit, which marks a hash. A shape that is no hash has a 1 in front of its digits.
const HASH: u64 = 1 << 63;
/// A shape with this bit or a higher one has no room for a further digit.
const FULL: u64 = 1 << 60;
/// Marks the last digit of a dimension.
const LAST: u64 = 8;

impl Shape {
    /// The shape with dimensions of these sizes.
    pub fn of(dims: &[usize]) -> Shape {
        let code = exact(dims).unwrap_or_else(|| hash(dims));
        Shape(NonZeroU64::new(code).unwrap_or(NonZeroU64::MIN))
    }

    /// The sizes of the dimensions; `None` if there is only a hash.
    fn dims(self) -> Option<Vec<u64>> {
        let code = self.code();
        if code & HASH != 0 {
            return None;
        }
        let digits = code.ilog2() / 4;
        let (mut dims, mut dim) = (Vec::new(), 0);
        for digit in (0..digits).rev().map(|nth| code >> (4 * nth) & 15) {
            dim = dim << 3 | digit & 7;
            if digit & LAST != 0 {
                dims.push(std::mem::take(&mut dim));
            }
        }
        Some(dims)
    }

    pub(crate) fn code(self) -> u64 {
        self.0.get()
    }

    /// The inverse of [`code`](Self::code); `None` for 0, which stands for no shape.
    pub(crate) fn from_code(code: u64) -> Option<Shape> {
        NonZeroU64::new(code).map(Shape)
    }
}

fn exact(dims: &[usize]) -> Option<u64> {
    let mut code = 1;
    for &dim in dims {
        let digits = (dim as u64 | 1).ilog2() / 3 + 1;
        for nth in (0..digits).rev() {
            if code >= FULL {
                return None;
            }
            let last = if nth == 0 { LAST } else { 0 };
            code = code << 4 | dim as u64 >> (3 * nth) & 7 | last;
        }
    }
    Some(code)
}

fn hash(dims: &[usize]) -> u64 {
    let mix = |hash: u64, dim: &usize| (hash ^ *dim as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    HASH | dims.iter().fold(dims.len() as u64, mix)
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dims() {
            Some(dims) => write!(f, "{dims:?}"),
            None => write!(f, "of hash {:x}", self.code()),
        }
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_shape_is_shown_as_it_was_given() {
        let shapes: [&[usize]; 9] = [
            &[],
            &[0],
            &[7, 8, 0, 1],
            &[1; 15],
            &[50_257, 768],
            &[32, 16, 1024, 1024],
            &[4, 16, 64, 128, 128],
            &[2, 3, 4, 5, 6, 7],
            &[usize::MAX >> 19],
        ];
        for dims in shapes {
            assert_eq!(Shape::of(dims).to_string(), format!("{dims:?}"));
        }
        assert_eq!(shapes.into_iter().map(Shape::of).collect::<HashSet<_>>().len(), shapes.len());
    }

    #[test]
    fn long_shapes_are_compared_by_hash() {
        let long = Shape::of(&[10_000; 4]);
        assert!(long.to_string().starts_with("of hash "), "{long}");
        assert_eq!(long, Shape::of(&[10_000; 4]));
        let mut others = vec![Shape::of(&[10_000, 10_000, 10_000, 10_001]), Shape::of(&[1; 16]), Shape::of(&[2; 16])];
        others.extend([Shape::of(&[1; 15]), Shape::of(&[usize::MAX]), long]);
        assert_eq!(others.iter().collect::<HashSet<_>>().len(), others.len());
        assert!(others.iter().all(|shape| Shape::from_code(shape.code()) == Some(*shape)));
    }
}
