//! Metrics that are means, reduced exactly over all ranks.

use std::panic::Location;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    AccuracyMetric, BleuScore, CharErrorRate, HammingScore, LossMetric, Metric, MetricAttributes, MetricMetadata,
    MetricName, Numeric, NumericEntry, PerplexityMetric, RougeLScore, SerializedEntry, TopKAccuracyMetric,
    WordErrorRate, format_float,
};
use burn_ddp_comm::attribute_calls;

use super::agreed_stop::metric_error;
use crate::Ddp;
use crate::exact_sums::ExactSum;

/// A metric whose value over several batches is the mean of the batches' values, weighted by their counts.
///
/// Burn's accuracy, loss, Hamming score, error rates, BLEU and ROUGE are such metrics: after each update their
/// `value()` is an `Aggregated` entry. Perplexity is one on a logarithmic scale. Implement it for such metrics of your
/// own: `impl MeanMetric for MyMetric {}`.
///
/// # Example
///
/// ```
/// use burn::train::metric::{AccuracyMetric, PerplexityMetric};
/// use burn_ddp::train::MeanMetric;
///
/// assert_eq!(AccuracyMetric::new().to_mean(0.9), 0.9);
/// let perplexity = PerplexityMetric::new();
/// let mean = (perplexity.to_mean(2.0) + perplexity.to_mean(8.0)) / 2.0; // of logarithms
/// assert!((perplexity.of_mean(mean) - 4.0).abs() < 1e-9);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not known to be a mean, so its value over all ranks does not follow from theirs",
    note = "use `ddp.gathered_metric(metric)` for Burn's AUROC, precision, recall and F-scores; \
            for a mean of your own `impl MeanMetric for …`; one that needs no reduction (learning \
            rate, CPU and GPU use) is registered without `ddp.metric`"
)]
pub trait MeanMetric: Metric + Numeric {
    /// A batch's value on the scale where the mean is taken. By default the value itself.
    fn to_mean(&self, value: f64) -> f64 {
        value
    }

    /// The inverse of [`to_mean`](Self::to_mean).
    fn of_mean(&self, mean: f64) -> f64 {
        mean
    }
}

impl MeanMetric for AccuracyMetric {}
impl MeanMetric for BleuScore {}
impl MeanMetric for CharErrorRate {}
impl MeanMetric for HammingScore {}
impl MeanMetric for LossMetric {}
impl MeanMetric for RougeLScore {}
impl MeanMetric for TopKAccuracyMetric {}
impl MeanMetric for WordErrorRate {}
impl MeanMetric for PerplexityMetric {
    fn to_mean(&self, value: f64) -> f64 {
        value.ln()
    }

    fn of_mean(&self, mean: f64) -> f64 {
        mean.exp()
    }
}

/// A metric with the value of all ranks; from [`DdpTrainer::metric`](super::DdpTrainer::metric).
///
/// At the end of a split the ranks exchange sum and count. Sums that are whole numbers, such as those of correct items,
/// are exact: then the value does not depend on the number of ranks. A rank without a batch adds nothing.
#[derive(Clone, Debug)]
pub struct GlobalMetric<Me> {
    metric: Me,
    ddp: Ddp,
    /// The line of the program that made the metric.
    site: &'static Location<'static>,
    /// Sum and count over this rank's batches since the split began.
    sum: ExactSum,
    count: usize,
    /// Value over all ranks at the end of the split.
    value: f64,
}

impl<Me: MeanMetric> GlobalMetric<Me> {
    pub(super) fn new(ddp: Ddp, metric: Me, site: &'static Location<'static>) -> Self {
        GlobalMetric { metric, ddp, site, sum: ExactSum::default(), count: 0, value: f64::NAN }
    }

    fn add(&mut self, entry: &NumericEntry) {
        let count = match entry {
            NumericEntry::Aggregated { count, .. } => *count,
            NumericEntry::Value(_) | NumericEntry::Final(_) => 1,
        };
        // The metric has no value for a batch of padding alone.
        if count > 0 {
            self.sum.add(whole(self.metric.to_mean(entry.current()) * count as f64));
            self.count += count;
        }
    }
}

impl<Me: MeanMetric> Metric for GlobalMetric<Me> {
    type Input = Me::Input;

    fn name(&self) -> MetricName {
        self.metric.name()
    }

    fn description(&self) -> Option<String> {
        self.metric.description()
    }

    fn attributes(&self) -> MetricAttributes {
        self.metric.attributes()
    }

    fn update(&mut self, item: &Me::Input, metadata: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        let entry = self.metric.update(item, metadata)?;
        if let Some(value) = self.metric.value() {
            self.add(&value);
        }
        Ok(entry)
    }

    /// *Collective*, in a group that only metrics use.
    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        let group = self.ddp.state().metric_group().map_err(metric_error)?;
        let own = (self.sum.numbers(), self.count);
        let all = attribute_calls(self.site, || group.all_gather_object(&own)).map_err(metric_error)?;
        let (mut sum, mut count) = (ExactSum::default(), 0);
        for (numbers, of_rank) in all {
            numbers.into_iter().for_each(|number| sum.add(number));
            count += of_rank;
        }
        self.value = self.metric.of_mean(sum.value() / count as f64);
        Ok(final_entry(self.value, &self.metric.attributes()))
    }

    fn clear(&mut self) {
        self.metric.clear();
        self.sum = ExactSum::default();
        self.count = 0;
    }
}

impl<Me: MeanMetric> Numeric for GlobalMetric<Me> {
    fn value(&self) -> Option<NumericEntry> {
        self.metric.value()
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.metric.running_value()
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Final(self.value)
    }
}

/// The entry that Burn shows and stores at the end of a split.
fn final_entry(value: f64, attributes: &MetricAttributes) -> SerializedEntry {
    let unit = match attributes {
        MetricAttributes::Numeric(numeric) => numeric.unit.as_ref().map(|unit| format!(" {unit}")).unwrap_or_default(),
        MetricAttributes::None => String::new(),
    };
    SerializedEntry::new(
        format!("epoch {}{unit} - all ranks", format_float(value, 2)),
        NumericEntry::Final(value).serialize(),
    )
}

/// Rounds a sum that differs from a whole number by no more than rounding errors: it was a count, which the metric
/// divided to a mean, and the caller multiplied back.
fn whole(sum: f64) -> f64 {
    let nearest = sum.round();
    if (sum - nearest).abs() <= 8.0 * f64::EPSILON * sum.abs() { nearest } else { sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_survive_the_way_through_a_percentage() {
        for items in 1..200_usize {
            for correct in 0..=items {
                let percent = 100.0 * (correct as f64 / items as f64);
                assert_eq!(whole(percent * items as f64), 100.0 * correct as f64, "{correct} of {items}");
            }
        }
        assert_eq!(whole(0.7), 0.7);
        assert!(whole(f64::NAN).is_nan());
    }
}
