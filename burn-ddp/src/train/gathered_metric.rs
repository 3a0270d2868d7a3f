//! Metrics computed from the items of all ranks.

use std::panic::Location;

use burn::data::dataloader::Progress;
use burn::tensor::{Device, Tensor, TensorData, TensorReadError};
use burn::train::metric::{
    BleuInput, CerInput, ConfusionStatsInput, Metric, MetricAttributes, MetricMetadata, MetricName, Numeric,
    NumericEntry, RougeLInput, SerializedEntry, WerInput,
};
use burn_ddp_comm::attribute_calls;

use super::agreed_stop::metric_error;
use super::gathered_batches::{Batch, each_batch};
use crate::Ddp;

/// Input of a metric for a batch, as tensors that travel between ranks.
///
/// Implemented for the inputs of Burn's metrics with public fields; above all for [`ConfusionStatsInput`], the input of
/// AUROC, precision–recall, precision, recall and F-scores.
///
/// # Example
///
/// ```
/// # use burn::tensor::{Tensor, TensorData, TensorReadError, Device};
/// use burn_ddp::train::GatherInput;
///
/// /// Input of a metric of your own.
/// struct Distances {
///     values: Tensor<1>,
/// }
///
/// impl GatherInput for Distances {
///     fn to_data(&self) -> Result<Vec<TensorData>, TensorReadError> {
///         Ok(vec![self.values.clone().try_into_data()?])
///     }
///
///     fn from_data(data: Vec<TensorData>, device: &Device) -> Option<Self> {
///         let [values] = <[TensorData; 1]>::try_from(data).ok()?;
///         Some(Distances { values: Tensor::from_data(values, device) })
///     }
/// }
///
/// let device = Device::default();
/// let input = Distances { values: Tensor::from_floats([1.0, 2.0], &device) };
/// assert!(Distances::from_data(input.to_data()?, &device).is_some());
/// assert!(Distances::from_data(Vec::new(), &device).is_none());
/// # Ok::<(), TensorReadError>(())
/// ```
pub trait GatherInput: Sized {
    /// The tensors of the input.
    ///
    /// # Errors
    ///
    /// A tensor that cannot be read from its device.
    fn to_data(&self) -> Result<Vec<TensorData>, TensorReadError>;

    /// The inverse of [`to_data`](Self::to_data), on `device`; `None` if these are not the tensors of such an input.
    fn from_data(data: Vec<TensorData>, device: &Device) -> Option<Self>;
}

macro_rules! gather {
    ($($input:ident { $first:ident, $second:ident },)*) => {
        $(impl GatherInput for $input {
            fn to_data(&self) -> Result<Vec<TensorData>, TensorReadError> {
                Ok(vec![self.$first.clone().try_into_data()?, self.$second.clone().try_into_data()?])
            }

            fn from_data(data: Vec<TensorData>, device: &Device) -> Option<Self> {
                let [$first, $second] = <[TensorData; 2]>::try_from(data).ok()?;
                Some($input { $first: Tensor::from_data($first, device), $second: Tensor::from_data($second, device) })
            }
        })*
    };
}

gather! {
    ConfusionStatsInput { predictions, targets },
    BleuInput { outputs, targets },
    CerInput { outputs, targets },
    RougeLInput { outputs, targets },
    WerInput { outputs, targets },
}

/// A metric computed from the items of all ranks; from
/// [`DdpTrainer::gathered_metric`](super::DdpTrainer::gathered_metric).
///
/// At the end of a split each rank computes the metric from the batches of all ranks, rank 0's first; with an
/// [`EvalLoader`](crate::data::EvalLoader) that is the order of the dataset. During the split a rank holds its own
/// batches in host memory, and at its end receives those of the other ranks a few at a time.
#[derive(Clone, Debug)]
pub struct GatheredMetric<Me> {
    /// The metric over this rank's batches, shown while a split runs.
    own: Me,
    /// The metric over the batches of all ranks, computed at the end of a split.
    all: Me,
    ddp: Ddp,
    /// The line of the program that made the metric.
    site: &'static Location<'static>,
    /// This rank's batches since the split began.
    batches: Vec<Batch>,
}

impl<Me: Metric + Numeric> GatheredMetric<Me>
where
    Me::Input: GatherInput,
{
    pub(super) fn new(ddp: Ddp, metric: Me, site: &'static Location<'static>) -> Self {
        GatheredMetric { own: metric.clone(), all: metric, ddp, site, batches: Vec::new() }
    }
}

impl<Me: Metric + Numeric> Metric for GatheredMetric<Me>
where
    Me::Input: GatherInput,
{
    type Input = Me::Input;

    fn name(&self) -> MetricName {
        self.own.name()
    }

    fn description(&self) -> Option<String> {
        self.own.description()
    }

    fn attributes(&self) -> MetricAttributes {
        self.own.attributes()
    }

    fn update(&mut self, item: &Me::Input, metadata: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        self.batches.push(item.to_data()?);
        self.own.update(item, metadata)
    }

    /// *Collective*, in a group that only metrics use.
    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        let group = self.ddp.state().metric_group().map_err(metric_error)?;
        self.all.clear();
        let add = |total, number, batch| {
            let device = self.ddp.device().map_err(metric_error)?;
            let input = Me::Input::from_data(batch, &device)
                .ok_or_else(|| metric_error(crate::Error::invalid("a rank registered another metric in this place")))?;
            let progress = Progress::new(number, total, Some("batches".into()));
            let metadata = MetricMetadata { progress, iteration: Some(number), lr: None };
            self.all.update(&input, &metadata).map(drop)
        };
        attribute_calls(self.site, || each_batch(group, &self.batches, add))?;
        let entry = self.all.compute()?;
        // The value of the split replaces what the metric stores itself.
        Ok(SerializedEntry::new(entry.formatted, self.final_value().serialize()))
    }

    fn clear(&mut self) {
        self.own.clear();
        self.all.clear();
        self.batches.clear();
    }
}

impl<Me: Metric + Numeric> Numeric for GatheredMetric<Me>
where
    Me::Input: GatherInput,
{
    fn value(&self) -> Option<NumericEntry> {
        self.own.value()
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.own.running_value()
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Final(self.all.final_value().current())
    }
}
