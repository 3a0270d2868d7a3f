//! A text as a dataset of windows of bytes.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::prelude::*;

/// The text that comes with the program: pages of this project's documentation.
const BUNDLED: [&str; 15] = [
    include_str!("../../../README.md"),
    include_str!("../../../docs/quickstart.md"),
    include_str!("../../../docs/migrating.md"),
    include_str!("../../../docs/data.md"),
    include_str!("../../../docs/models.md"),
    include_str!("../../../docs/checkpoints.md"),
    include_str!("../../../docs/launching.md"),
    include_str!("../../../docs/errors.md"),
    include_str!("../../../docs/devices-and-engines.md"),
    include_str!("../../../docs/trainer.md"),
    include_str!("../../../docs/security.md"),
    include_str!("../../../docs/architecture.md"),
    include_str!("../../../burn-ddp/src/intercept/README.md"),
    include_str!("../../../burn-ddp/src/gradients/README.md"),
    include_str!("../../../burn-ddp/comm/README.md"),
];

/// Consecutive windows of a text, which overlap by one byte: each byte but the first is predicted once.
#[derive(Debug, Clone)]
pub struct Windows {
    text: Arc<[u8]>,
    context: usize,
}

/// `context` bytes and the byte that follows each of them: `context + 1` bytes in all.
pub type Window = Vec<u8>;

impl Windows {
    /// Windows that predict `context` bytes each; the bytes after the last whole window are left out.
    pub fn new(text: &[u8], context: usize) -> Windows {
        Windows { text: text.into(), context }
    }

    /// Training data and test data: the first nine tenths and the last tenth of the file, or of the bundled text.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or the last tenth of the text holds no window.
    pub fn of_text(file: Option<&Path>, context: usize) -> Result<[Windows; 2]> {
        let text = match file {
            Some(file) => std::fs::read(file).with_context(|| format!("--text {}: cannot read it", file.display()))?,
            None => BUNDLED.concat().into_bytes(),
        };
        let (train, test) = text.split_at(text.len() / 10 * 9);
        let windows = [train, test].map(|part| Windows::new(part, context));
        ensure!(
            windows[1].len() > 0,
            "a text of {} bytes is too short for --context {context}: its last tenth, the test data, needs {} bytes",
            text.len(),
            context + 1
        );
        Ok(windows)
    }
}

impl Dataset<Window> for Windows {
    fn get(&self, index: usize) -> Result<Window, DatasetError> {
        Ok(self.text[index * self.context..][..self.context + 1].to_vec())
    }

    fn len(&self) -> usize {
        self.text.len().saturating_sub(1) / self.context
    }
}

/// Windows of a backward on one rank.
#[derive(Debug, Clone)]
pub struct TextBatch {
    /// Input bytes, `[windows, context]`.
    pub bytes: Tensor<2, Int>,
    /// The byte after each input byte, `[windows, context]`.
    pub next: Tensor<2, Int>,
}

/// Makes batches of windows.
#[derive(Debug, Clone)]
pub struct TextBatcher;

impl Batcher<Window, TextBatch> for TextBatcher {
    fn batch(&self, items: Vec<Window>, device: &Device) -> TextBatch {
        let (windows, len) = (items.len(), items.first().map_or(0, Vec::len));
        let values: Vec<i32> = items.into_iter().flatten().map(i32::from).collect();
        let all = Tensor::<2, Int>::from_data(TensorData::new(values, [windows, len]), device);
        TextBatch { bytes: all.clone().slice([0..windows, 0..len - 1]), next: all.slice([0..windows, 1..len]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_but_the_first_is_predicted_once() {
        let windows = Windows::new(b"abcdefgh", 3);
        assert_eq!(windows.len(), 2);
        assert_eq!(windows.get(0).unwrap(), b"abcd");
        assert_eq!(windows.get(1).unwrap(), b"defg");
        assert_eq!(Windows::new(b"abcdefg", 3).len(), 2);
        assert_eq!(Windows::new(b"", 3).len(), 0);
    }

    #[test]
    fn targets_are_the_bytes_that_follow() {
        let batch = TextBatcher.batch(vec![b"abcd".to_vec(), b"defg".to_vec()], &Device::flex());
        let values = |tensor: Tensor<2, Int>| tensor.into_data().convert::<i64>().try_to_vec::<i64>().unwrap();
        let bytes = |text: &[u8]| text.iter().map(|byte| i64::from(*byte)).collect::<Vec<_>>();
        assert_eq!(values(batch.bytes), bytes(b"abcdef"));
        assert_eq!(values(batch.next), bytes(b"bcdefg"));
    }

    #[test]
    fn a_text_is_split_and_a_short_one_refused() {
        let [train, test] = Windows::of_text(None, 64).unwrap();
        assert!(train.len() > 8 * test.len() && test.len() > 10, "{} and {}", train.len(), test.len());
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("text");
        std::fs::write(&file, [b'x'; 640]).unwrap();
        let error = Windows::of_text(Some(&file), 64).unwrap_err().to_string();
        assert!(error.contains("640 bytes") && error.contains("--context 64"), "{error}");
        let error = Windows::of_text(Some(&dir.path().join("none")), 64).unwrap_err().to_string();
        assert!(error.contains("--text") && error.contains("none"), "{error}");
    }
}
