//! The digest that `determinism` compares: a hash of the results of collectives on random floats after random pauses.

use std::hash::{DefaultHasher, Hasher};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use burn_ddp_comm::{DType, ProcessGroup, ReduceOp, SharedBuffer};
use half::{bf16, f16};

use super::BufferKind;

/// Number of elements that are reduced.
const LEN: usize = 100_003;
/// Numbers of elements of the buckets into which they are cut.
const BUCKETS: [usize; 6] = [LEN, 65_536, 20_011, 8192, 4097, 1000];
/// Number of calls with each bucket size, the first ones, before which a rank pauses; more pauses would only take time.
const PAUSES: usize = 6;

#[derive(Clone, Copy)]
enum Kind {
    Op(ReduceOp),
    Weighted,
}

/// Digest of all results of this run. It is the same on every rank and in every run if the bits of results depend only
/// on the inputs.
pub(super) fn digest(group: &ProcessGroup, dtype: DType, kind: BufferKind, run: u64, pause_us: u64) -> Result<u64> {
    let rank = group.rank() as u64;
    let input = floats(dtype, rank);
    let mut pauses = Random(run * 1000 + rank + 1);
    let mut digest = DefaultHasher::new();
    for reduction in [Kind::Op(ReduceOp::Sum), Kind::Op(ReduceOp::Mean), Kind::Weighted] {
        let mut first: Option<Vec<u8>> = None;
        // Each run uses two of the sizes, the first and another; together the runs use all.
        for nth in [0, 1 + run as usize % (BUCKETS.len() - 1)] {
            let bucket_bytes = BUCKETS[nth] * dtype.size_bytes();
            let mut result = input.clone();
            for (call, bucket) in result.chunks_mut(bucket_bytes).enumerate() {
                if call < PAUSES {
                    thread::sleep(Duration::from_micros(pauses.next() % (pause_us + 1)));
                }
                reduce(group, dtype, kind, reduction, bucket)?;
            }
            // The other size depends on the run, so a difference between bucket sizes changes the run's digest.
            match &first {
                None => first = Some(result),
                Some(first) if *first == result => digest.write_u8(0),
                Some(_) => digest.write_u64(nth as u64),
            }
        }
        digest.write(&first.unwrap_or_default());
    }
    Ok(digest.finish())
}

fn reduce(group: &ProcessGroup, dtype: DType, kind: BufferKind, reduction: Kind, bucket: &mut [u8]) -> Result<()> {
    let weight = 1.0 + group.rank() as f64 / 3.0;
    match (kind, reduction) {
        (BufferKind::Slice, Kind::Op(op)) => group.all_reduce_bytes(dtype, bucket, op, 0)?,
        (BufferKind::Slice, Kind::Weighted) => group.all_reduce_weighted_bytes(dtype, bucket, weight, 0)?,
        (BufferKind::Arena, _) => {
            let mut shared: Vec<SharedBuffer> = group.shared_buffers(&[bucket.len()])?;
            shared[0].bytes_mut().copy_from_slice(bucket);
            let view = match reduction {
                Kind::Op(op) => group.all_reduce_shared(dtype, &mut shared[0], op, 0)?,
                Kind::Weighted => group.all_reduce_weighted_shared(dtype, &mut shared[0], weight, 0)?,
            };
            bucket.copy_from_slice(&view);
        }
    }
    Ok(())
}

/// Random floats of magnitudes up to 2⁴, similar enough that the order of additions changes the bits of their sums.
fn floats(dtype: DType, rank: u64) -> Vec<u8> {
    let mut random = Random(77 + rank);
    let mut bytes = Vec::with_capacity(LEN * dtype.size_bytes());
    for _ in 0..LEN {
        let mantissa = random.next() as f64 / u64::MAX as f64 - 0.5;
        let x = mantissa * f64::powi(2.0, (random.next() % 12) as i32 - 6);
        match dtype {
            DType::F64 => bytes.extend(x.to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f64(x).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f64(x).to_le_bytes()),
            _ => bytes.extend((x as f32).to_le_bytes()),
        }
    }
    bytes
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
