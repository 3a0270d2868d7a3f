//! Sums of numbers whose bits do not depend on the order of the additions, so on no number of processes.

use crate::{Ddp, Result};

/// A sum of floats without rounding: numbers that do not overlap, whose exact sum is that of all numbers added
/// (Shewchuk, 1997, as in Python's `math.fsum`).
#[derive(Clone, Debug, Default)]
pub(crate) struct ExactSum {
    /// From the smallest.
    parts: Vec<f64>,
    /// Sum of the infinities and NaNs.
    special: Option<f64>,
}

impl ExactSum {
    pub(crate) fn add(&mut self, number: f64) {
        if !number.is_finite() || self.special.is_some() {
            return self.overflow(number);
        }
        let (mut carry, mut kept) = (number, 0);
        for nth in 0..self.parts.len() {
            let (mut large, mut small) = (carry, self.parts[nth]);
            if large.abs() < small.abs() {
                (large, small) = (small, large);
            }
            let sum = large + small;
            let lost = small - (sum - large);
            if lost != 0.0 {
                self.parts[kept] = lost;
                kept += 1;
            }
            carry = sum;
        }
        self.parts.truncate(kept);
        match carry.is_finite() {
            true => self.parts.push(carry),
            false => self.overflow(carry),
        }
    }

    /// From here on only infinities and NaNs count.
    fn overflow(&mut self, number: f64) {
        self.parts.clear();
        let number = if number.is_finite() { 0.0 } else { number };
        self.special = Some(self.special.unwrap_or_default() + number);
    }

    /// What another rank needs to add this sum to its own.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        self.special.iter().chain(&self.parts).copied().collect()
    }

    /// The sum, rounded once.
    pub(crate) fn value(&self) -> f64 {
        if let Some(special) = self.special {
            return special;
        }
        let mut parts = self.parts.iter().rev().copied();
        let Some(mut sum) = parts.next() else { return 0.0 };
        while let Some(part) = parts.next() {
            let before = sum;
            sum = before + part;
            let lost = part - (sum - before);
            if lost != 0.0 {
                // Half of a last place was rounded to even: what is behind it decides.
                if parts.next().is_some_and(|next| (next < 0.0) == (lost < 0.0)) {
                    let (twice, rounded) = (lost * 2.0, sum + lost * 2.0);
                    if rounded - sum == twice {
                        sum = rounded;
                    }
                }
                break;
            }
        }
        sum
    }
}

/// A weighted mean, or a sum, of numbers of all processes, with the same bits on any number of them. From
/// [`Ddp::exact_sums`].
///
/// For numbers that steer training: a plateau schedule or early stopping that looks at `ddp.mean(loss)?`, a mean over
/// processes, may decide differently on another number of processes. Here nothing is rounded before the end, so the
/// order of the additions does not matter: it suffices that the numbers are the same, as those of [logical
/// ranks](Ddp::set_logical_ranks) are.
///
/// ```
/// # use burn_ddp::prelude::*;
/// let mut means = Vec::new();
/// for processes in [1, 2, 4] {
///     means.extend(Ddp::spawn(processes, |ddp| {
///         ddp.set_logical_ranks(4)?;
///         let mut loss = ddp.exact_sums();
///         for _ in 0..4 / processes {
///             let leaf = ddp.next_leaf()?;
///             loss.add(0.1 * leaf as f64, 3.0); // the loss of the leaf's batch, and its items
///         }
///         Ok(loss.mean()?)
///     })?);
/// }
/// assert!(means.iter().all(|mean| *mean == means[0]));
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ExactSums {
    ddp: Ddp,
    values: ExactSum,
    weights: ExactSum,
}

impl Ddp {
    /// Sums of numbers of all processes whose bits do not depend on their number. Makes no collective by itself.
    ///
    /// # Example
    ///
    /// As in [`ExactSums`].
    #[must_use]
    pub fn exact_sums(&self) -> ExactSums {
        ExactSums { ddp: self.clone(), values: ExactSum::default(), weights: ExactSum::default() }
    }
}

impl ExactSums {
    /// Adds `weight` times `value`. At weight 0 the value is ignored, even NaN. Makes no collective.
    pub fn add(&mut self, value: f64, weight: f64) {
        if weight != 0.0 {
            self.values.add(value * weight);
            self.weights.add(weight);
        }
    }

    /// The weighted mean over all processes; NaN if nothing has a weight. *Collective*. Costs an all-gather of some 32
    /// bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed.
    #[track_caller]
    pub fn mean(self) -> Result<f64> {
        let [value, weight] = self.reduce()?;
        Ok(value / weight)
    }

    /// The sum of all weighted values over all processes. *Collective*, as [`mean`](Self::mean).
    ///
    /// # Errors
    ///
    /// [`Error::Comm`](crate::Error::Comm) if a peer failed.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn_ddp::prelude::*;
    /// let sums = Ddp::spawn(2, |ddp| {
    ///     let mut correct = ddp.exact_sums();
    ///     correct.add(1.0, 3.0); // three times 1
    ///     Ok(correct.sum()?)
    /// })?;
    /// assert_eq!(sums, [6.0, 6.0]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn sum(self) -> Result<f64> {
        Ok(self.reduce()?[0])
    }

    #[track_caller]
    fn reduce(self) -> Result<[f64; 2]> {
        let own = [self.values.numbers(), self.weights.numbers()];
        let all = self.ddp.group().all_gather_object(&own)?;
        let mut sums = [ExactSum::default(), ExactSum::default()];
        for of_rank in all {
            for (sum, numbers) in sums.iter_mut().zip(of_rank) {
                numbers.into_iter().for_each(|number| sum.add(number));
            }
        }
        Ok(sums.map(|sum| sum.value()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(numbers: &[f64]) -> f64 {
        let mut sum = ExactSum::default();
        numbers.iter().for_each(|number| sum.add(*number));
        sum.value()
    }

    #[test]
    fn nothing_is_lost() {
        assert_eq!(sum(&[]), 0.0);
        assert_eq!(sum(&[1e100, 1.0, -1e100]), 1.0);
        assert_eq!(sum(&[0.1; 10]), 1.0);
        // Half of a last place above 1, and a bit more or less behind it.
        let half = f64::EPSILON / 2.0;
        assert_eq!(sum(&[1.0, half]), 1.0);
        assert_eq!(sum(&[1.0, half, 1e-40]), 1.0 + f64::EPSILON);
        assert_eq!(sum(&[1.0 + f64::EPSILON, half, -1e-40]), 1.0 + f64::EPSILON);
    }

    #[test]
    fn what_is_no_number_stays() {
        assert_eq!(sum(&[f64::INFINITY, 1.0]), f64::INFINITY);
        assert!(sum(&[f64::INFINITY, f64::NEG_INFINITY]).is_nan());
        assert!(sum(&[f64::NAN, 1.0]).is_nan());
        assert_eq!(sum(&[f64::MAX, f64::MAX]), f64::INFINITY);
    }

    proptest! {
        #[test]
        fn neither_order_nor_parts_matter(
            numbers in proptest::collection::vec((any::<i32>(), -60_i32..60), 0..40),
            order in any::<u64>(),
            cut in 0_usize..40,
        ) {
            let numbers: Vec<f64> = numbers.into_iter().map(|(m, e)| f64::from(m) * 2_f64.powi(e)).collect();
            let expected = sum(&numbers);
            let mut shuffled = numbers.clone();
            let mut state = order | 1;
            for nth in (1..shuffled.len()).rev() {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                shuffled.swap(nth, (state >> 33) as usize % (nth + 1));
            }
            prop_assert_eq!(sum(&shuffled).to_bits(), expected.to_bits());
            let (left, right) = shuffled.split_at(cut.min(shuffled.len()));
            let mut of_two = ExactSum::default();
            for part in [left, right] {
                let mut of_one = ExactSum::default();
                part.iter().for_each(|number| of_one.add(*number));
                of_one.numbers().into_iter().for_each(|number| of_two.add(number));
            }
            prop_assert_eq!(of_two.value().to_bits(), expected.to_bits());
        }
    }

    #[test]
    fn a_mean_does_not_depend_on_processes_and_weight_0_adds_nothing() {
        let of = |processes: usize| {
            let means = Ddp::spawn(processes, |ddp| {
                let mut sums = ddp.exact_sums();
                for nth in (ddp.rank()..6).step_by(processes) {
                    let weight = [0.3, 1.0, 0.0, 7.0, 0.1, 3.0][nth];
                    sums.add(if weight == 0.0 { f64::NAN } else { 1.0 / (nth as f64 + 3.0) }, weight);
                }
                Ok(sums.mean()?)
            });
            means.unwrap()
        };
        let one = of(1)[0];
        assert!((one - 1.905_952_380_952 / 11.4).abs() < 1e-12, "{one}");
        for processes in 2..=6 {
            assert!(of(processes).iter().all(|mean| mean.to_bits() == one.to_bits()), "{processes}");
        }
        let empty = Ddp::spawn(2, |ddp| Ok((ddp.exact_sums().mean()?.is_nan(), ddp.exact_sums().sum()?)));
        assert_eq!(empty.unwrap(), [(true, 0.0); 2]);
    }
}
