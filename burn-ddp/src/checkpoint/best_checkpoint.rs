//! Choice of the best checkpoints, by a value that was saved with them.

use super::manifest::Manifest;

/// Direction of a metric: its lowest or its highest value is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Best {
    /// The lowest value is the best, as for a loss.
    Lowest,
    /// The highest value is the best, as for an accuracy.
    Highest,
}

impl Best {
    /// The checkpoints whose value `metric` is a number, the best first; checkpoints with equal numbers stay in the
    /// order of `checkpoints`.
    pub(super) fn sort<'a, T>(self, metric: &str, checkpoints: &'a [(T, Manifest)]) -> Vec<&'a T> {
        let number = |manifest: &Manifest| manifest.values.get(metric).and_then(serde_json::Value::as_f64);
        let with_number = checkpoints.iter().filter_map(|(checkpoint, manifest)| Some((checkpoint, number(manifest)?)));
        let mut numbers: Vec<(&T, f64)> = with_number.collect();
        numbers.sort_by(|(_, one), (_, other)| match self {
            Best::Lowest => one.total_cmp(other),
            Best::Highest => other.total_cmp(one),
        });
        numbers.into_iter().map(|(checkpoint, _)| checkpoint).collect()
    }
}
