//! Mean and variance of elements that are spread over ranks.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ddp_comm::ProcessGroup;

use crate::{Error, Result, tensor_conversion};

/// Count, means and biased variances, one of each per channel, in f64.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Moments {
    /// Elements of each channel.
    pub(super) count: f64,
    pub(super) means: Vec<f64>,
    pub(super) variances: Vec<f64>,
}

impl Moments {
    /// Moments of this rank's `x`, `[items, channels, …]`: the mean first, then the mean of the squared deviations from
    /// it. Half precision is computed in f32.
    pub(super) fn of<const D: usize>(x: Tensor<D>) -> Result<Moments> {
        let dims = x.dims();
        let channels = dims[1];
        let count = dims.iter().product::<usize>() / channels;
        if count == 0 {
            return Ok(Moments { count: 0.0, means: vec![0.0; channels], variances: vec![0.0; channels] });
        }
        let dtype = wide(x.dtype());
        let x = x.cast(dtype);
        let x: Tensor<2> = x.swap_dims(0, 1).reshape([channels, count]);
        let mean = x.clone().mean_dim(1);
        let variance = (x - mean.clone()).square().mean_dim(1);
        let data = tensor_conversion::data_of(Tensor::cat(vec![mean, variance], 0));
        let data = data.map_err(|e| Error::invalid(format!("reading moments from their device failed: {e}")))?;
        let mut means = values(data)?;
        let variances = means.split_off(channels);
        Ok(Moments { count: count as f64, means, variances })
    }

    /// Moments of the elements of all ranks whose batch `counts` together; of no elements if none does. *Collective*:
    /// one all-gather.
    #[track_caller]
    pub(super) fn gather(&self, group: &ProcessGroup, counts: bool) -> Result<Moments> {
        let head = [self.count, f64::from(u8::from(counts))];
        let row: Vec<f64> = head.iter().chain(&self.means).chain(&self.variances).copied().collect();
        let rows = group.all_gather(&row)?;
        let rows = rows.chunks_exact(row.len());
        if rows.clone().all(|row| row[0] == 0.0) {
            return Err(Error::invalid("batch normalisation in training: no rank has an item"));
        }
        let counted: Vec<Moments> = rows.filter(|row| row[1] > 0.0).map(|row| self.like(&row[2..], row[0])).collect();
        Ok(Moments::merge(&counted, self.means.len()))
    }

    fn like(&self, row: &[f64], count: f64) -> Moments {
        let (means, variances) = row.split_at(self.means.len());
        Moments { count, means: means.into(), variances: variances.into() }
    }

    /// Adds to each part's variance the square of its mean's deviation from the common mean (Chan, Golub and LeVeque,
    /// *Updating formulae and a pairwise algorithm for computing sample variances*, 1979), which avoids cancellation.
    /// Parts without elements are ignored.
    fn merge(parts: &[Moments], channels: usize) -> Moments {
        let count: f64 = parts.iter().map(|part| part.count).sum();
        if count == 0.0 {
            return Moments { count, means: vec![0.0; channels], variances: vec![0.0; channels] };
        }
        let over_parts = |of: &dyn Fn(&Moments) -> f64| {
            parts.iter().filter(|part| part.count > 0.0).map(|part| part.count * of(part)).sum::<f64>() / count
        };
        let means: Vec<f64> = (0..channels).map(|c| over_parts(&|part| part.means[c])).collect();
        let deviation = |part: &Moments, c: usize| part.variances[c] + (part.means[c] - means[c]).powi(2);
        let variances = (0..channels).map(|c| over_parts(&|part| deviation(part, c))).collect();
        Moments { count, means, variances }
    }
}

/// Element type of computations on tensors of `dtype`: f32 for half precision.
pub(super) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// The elements in f64.
pub(super) fn values(data: TensorData) -> Result<Vec<f64>> {
    data.try_into_vec_as::<f64>().map_err(|e| Error::invalid(format!("reading elements as f64: {e:?}")))
}

/// One value per channel as a tensor.
pub(super) fn per_channel(values: &[f64], dtype: DType, device: &Device) -> Tensor<1> {
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(x: &[f64]) -> Moments {
        let count = x.len() as f64;
        let mean = x.iter().sum::<f64>() / count.max(1.0);
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count.max(1.0);
        Moments { count, means: vec![mean], variances: vec![variance] }
    }

    #[test]
    fn parts_of_any_size_are_as_the_whole() {
        let x: Vec<f64> = (0..10).map(|i| f64::from(i * i % 7)).collect();
        let whole = moments(&x);
        for (a, b) in [(0, 10), (1, 1), (3, 7), (10, 10)] {
            let parts = [moments(&x[..a]), moments(&x[a..b]), moments(&x[b..])];
            let merged = Moments::merge(&parts, 1);
            assert_eq!(merged.count, 10.0);
            assert!((merged.means[0] - whole.means[0]).abs() < 1e-15, "{merged:?} {whole:?}");
            assert!((merged.variances[0] - whole.variances[0]).abs() < 1e-14, "{merged:?} {whole:?}");
        }
    }

    #[test]
    fn a_small_variance_beside_a_large_mean_survives() {
        let merged = Moments::merge(&[moments(&[1e9, 1e9 + 1.0]), moments(&[1e9 + 2.0, 1e9 + 3.0])], 1);
        assert_eq!(merged.variances, [1.25]);
    }

    #[test]
    fn nothing_merges_to_nothing() {
        assert_eq!(Moments::merge(&[moments(&[]), moments(&[])], 1).count, 0.0);
    }
}
