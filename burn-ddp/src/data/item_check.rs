//! Comparison of a few items between the ranks and between two reads, since a dataset must be the same on all ranks.

use std::fmt::Debug;

use burn::data::dataset::Dataset;
use xxhash_rust::xxh3::xxh3_64;

use super::DataError;

/// Number of items that are compared, spread over the dataset.
const COMPARED: usize = 8;
/// Number of characters of an item that a message shows.
const SHOWN: usize = 60;

/// Text by which items are compared.
pub(super) type Describe<I> = Box<dyn Fn(&I) -> String + Send + Sync>;

pub(super) fn describe_by<I, E: Debug>(value: impl Fn(&I) -> E + Send + Sync + 'static) -> Describe<I> {
    Box::new(move |item| shortened(format!("{:?}", value(item))))
}

/// Items of this rank's dataset.
#[derive(Default)]
pub(super) struct Items {
    /// Name and text of each item.
    pub(super) settings: Vec<(String, String)>,
    /// The error of the first item that changes when it is read again.
    pub(super) changing: Option<DataError>,
}

impl Items {
    /// Reads each of the compared items twice.
    pub(super) fn read<I>(dataset: &dyn Dataset<I>, describe: &Describe<I>) -> Self {
        let text = |index| match dataset.get(index) {
            Ok(item) => describe(&item),
            Err(error) => format!("unreadable ({error})"),
        };
        let (len, mut items) = (dataset.len(), Items::default());
        for nth in 0..COMPARED.min(len) {
            let index = (nth as u128 * len as u128 / COMPARED.min(len) as u128) as usize;
            let (first, again) = (text(index), text(index));
            if first != again && items.changing.is_none() {
                items.changing = Some(DataError::ItemChanges { index, first: first.clone(), again });
            }
            items.settings.push((format!("item {index}"), first));
        }
        items
    }
}

/// The text; if it is long, its beginning and a digest of the whole text.
fn shortened(text: String) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… (digest {:016x})", &text[..end], xxh3_64(text.as_bytes())),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use burn::data::dataset::InMemDataset;

    use super::*;

    #[test]
    fn items_are_spread_over_the_dataset_and_long_ones_are_cut() {
        let read = |len: usize| {
            let dataset = InMemDataset::new((0..len).collect());
            Items::read(&dataset, &describe_by(|item: &usize| *item)).settings
        };
        let names = |len| read(len).into_iter().map(|(name, text)| format!("{name}: {text}")).collect::<Vec<_>>();
        assert_eq!(names(2), ["item 0: 0", "item 1: 1"]);
        assert_eq!(names(80)[7], "item 70: 70");
        assert!(names(0).is_empty());

        let (one, other) = ("ä".repeat(100), "ä".repeat(101));
        let [one, other] = [one, other].map(shortened);
        assert!(one != other && one.chars().count() < SHOWN + 30, "{one}");
    }
}
