//! Inputs whose sums are known: small whole numbers that encode rank, position and round, exact in every dtype.

use anyhow::{Result, bail};
use burn_ddp_comm::DType;
use half::{bf16, f16};

/// Elements until the pattern repeats: a prime, so that a part of a buffer at the wrong position shows as a wrong sum.
const PERIOD: usize = 1021;

/// One period of the pattern, as bytes.
pub(crate) struct Pattern {
    bytes: Vec<u8>,
    size_bytes: usize,
}

/// Input of rank `rank`.
pub(crate) fn input(dtype: DType, rank: usize, seed: u64) -> Pattern {
    Pattern::of(dtype, |i| value(i, rank, seed))
}

/// The sum over `world` ranks after `uses` reductions of the same buffer in place; `None` if it may not be exact.
pub(crate) fn sum(dtype: DType, world: usize, seed: u64, uses: usize) -> Option<Pattern> {
    if uses == 0 || (uses > 1 && !world.is_power_of_two()) {
        return None;
    }
    let factor = (world as f64).powi(uses as i32 - 1);
    Some(Pattern::of(dtype, |i| factor * (0..world).map(|rank| value(i, rank, seed)).sum::<f64>()))
}

fn value(i: usize, rank: usize, seed: u64) -> f64 {
    (1 + (5 * i as u64 + 3 * rank as u64 + seed) % 8) as f64
}

impl Pattern {
    fn of(dtype: DType, value: impl Fn(usize) -> f64) -> Pattern {
        let mut bytes = Vec::with_capacity(PERIOD * dtype.size_bytes());
        for x in (0..PERIOD).map(value) {
            match dtype {
                DType::F64 => bytes.extend(x.to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f64(x).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f64(x).to_le_bytes()),
                _ => bytes.extend((x as f32).to_le_bytes()),
            }
        }
        Pattern { bytes, size_bytes: dtype.size_bytes() }
    }

    /// Fills `buffer` with repetitions of the pattern.
    pub(crate) fn fill(&self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(self.bytes.len()) {
            chunk.copy_from_slice(&self.bytes[..chunk.len()]);
        }
    }

    /// Compares `buffer` with repetitions of the pattern.
    ///
    /// # Errors
    /// Names the first element that differs.
    pub(crate) fn check(&self, buffer: &[u8]) -> Result<()> {
        for (nth, chunk) in buffer.chunks(self.bytes.len()).enumerate() {
            if chunk != &self.bytes[..chunk.len()] {
                let byte = chunk.iter().zip(&self.bytes).position(|(a, b)| a != b).unwrap_or(0);
                bail!("wrong sum at element {}", nth * PERIOD + byte / self.size_bytes);
            }
        }
        Ok(())
    }
}

/// The dtype of a name on the command line.
///
/// # Errors
/// A message that lists the names.
pub(crate) fn parse_dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        "f64" => Ok(DType::F64),
        _ => Err("expected f32, f16, bf16 or f64".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_element_is_found() {
        let mut buffer = vec![0; 4 * 3000];
        for (rank, seed) in [(0, 1), (3, 9)] {
            input(DType::F32, rank, seed).fill(&mut buffer);
            input(DType::F32, rank, seed).check(&buffer).unwrap();
            assert!(input(DType::F32, rank + 1, seed).check(&buffer).is_err());
        }
        buffer[4 * 2000] ^= 1;
        let error = input(DType::F32, 3, 9).check(&buffer).unwrap_err().to_string();
        assert_eq!(error, "wrong sum at element 2000");
    }

    #[test]
    fn sums_are_exact() {
        assert!(sum(DType::F32, 3, 0, 2).is_none());
        let mut buffer = vec![0; 2 * 10];
        sum(DType::BF16, 2, 0, 2).unwrap().fill(&mut buffer);
        assert_eq!(bf16::from_le_bytes([buffer[0], buffer[1]]).to_f64(), 2.0 * (1.0 + 4.0));
    }
}
