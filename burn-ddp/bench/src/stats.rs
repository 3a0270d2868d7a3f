//! Medians and percentiles.

/// The value below which a share `p` of `values` lies (nearest rank); NaN if there is none.
pub(crate) fn percentile(values: &[f64], p: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n => sorted[((p * n as f64).ceil() as usize).clamp(1, n) - 1],
    }
}

/// The value in the middle, or the mean of the two in the middle; NaN if there is none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// The median of the quotients of times of the same round. A quotient cancels disturbances of the whole round.
pub(crate) fn ratio(numerators: &[f64], denominators: &[f64]) -> f64 {
    let quotients: Vec<f64> = numerators.iter().zip(denominators).map(|(n, d)| n / d).collect();
    median(&quotients)
}

/// The median of the differences of times of the same round.
pub(crate) fn difference(minuends: &[f64], subtrahends: &[f64]) -> f64 {
    let differences: Vec<f64> = minuends.iter().zip(subtrahends).map(|(m, s)| m - s).collect();
    median(&differences)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.95, 0.99, 1.0].map(|p| percentile(&values, p)), [50.0, 95.0, 99.0, 100.0]);
        assert_eq!(median(&values), 50.5);
        assert!(median(&[]).is_nan() && percentile(&[], 0.5).is_nan());
        assert_eq!(difference(&[2.0, 40.0, 3.0], &[1.0, 10.0, 1.0]), 2.0);
        assert_eq!(ratio(&[2.0, 40.0, 3.0], &[1.0, 10.0, 1.0]), 3.0);
    }
}
