//! Training of a small transformer that predicts the bytes of a text.
//!
//! | | |
//! |---|---|
//! | [`windows`] | a text as a dataset of windows |
//! | [`gpt`] | the network |
//! | [`train_text`] | the options of `gpt`, the loss, a generated text |

pub mod gpt;
pub mod train_text;
pub mod windows;
