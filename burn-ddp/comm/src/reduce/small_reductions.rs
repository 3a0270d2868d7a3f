//! Reductions of a few elements on two ranks: a loss, a flag, a count. The steps that large buffers need would take
//! longer than the reduction itself.

use half::bf16;

use super::element::{Float, Number, Stored};
use super::source::Source;
use crate::{DType, ReduceOp};

/// Bytes of an output at most.
const MAX_BYTES: usize = 64;

/// Reduces two sources into `out`, which they fit; false, without a result, if `out` is too large or the type too rare.
/// `op` is defined for `dtype`.
#[inline]
pub(super) fn two(dtype: DType, op: ReduceOp, sources: &[Source<'_>], out: &mut [u8]) -> bool {
    let [a, b] = sources else { return false };
    if out.len() > MAX_BYTES {
        return false;
    }
    match dtype {
        DType::F64 => floats::<f64>(op, a, b, out),
        DType::F32 => floats::<f32>(op, a, b, out),
        DType::BF16 => floats::<bf16>(op, a, b, out),
        DType::I64 => numbers::<i64>(op, a, b, out),
        DType::I32 => numbers::<i32>(op, a, b, out),
        DType::F16 | DType::I8 | DType::U8 | DType::Bool => return false,
    }
    true
}

fn floats<L: Stored<Acc: Float>>(op: ReduceOp, a: &Source<'_>, b: &Source<'_>, out: &mut [u8]) {
    if op == ReduceOp::Mean {
        let half = L::Acc::from_f64(0.5);
        return each::<L>(a, b, out, |x, y| x.add(y).mul(half).canonical());
    }
    numbers::<L>(op, a, b, out);
}

/// All but the mean.
fn numbers<L: Stored>(op: ReduceOp, a: &Source<'_>, b: &Source<'_>, out: &mut [u8]) {
    match op {
        ReduceOp::Min => each::<L>(a, b, out, |x, y| x.min(y).canonical()),
        ReduceOp::Max => each::<L>(a, b, out, |x, y| x.max(y).canonical()),
        ReduceOp::Product => each::<L>(a, b, out, |x, y| x.mul(y).canonical()),
        ReduceOp::Sum | ReduceOp::Mean => each::<L>(a, b, out, |x, y| x.add(y).canonical()),
    }
}

#[inline(always)]
fn each<L: Stored>(a: &Source<'_>, b: &Source<'_>, out: &mut [u8], fold: impl Fn(L::Acc, L::Acc) -> L::Acc) {
    let out: &mut [L::Bytes] = bytemuck::cast_slice_mut(out);
    for (at, element) in out.iter_mut().enumerate() {
        let load = |source: &Source<'_>| match source {
            Source::Bytes(bytes) => L::load(bytemuck::cast_slice::<u8, L::Bytes>(bytes)[at]),
            Source::Output => L::load(*element),
        };
        *element = L::store(fold(load(a), load(b)));
    }
}
