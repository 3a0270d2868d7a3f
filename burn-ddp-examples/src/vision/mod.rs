//! The parts of the trainers for pictures, `resnet` and `alexnet`.
//!
//! | | |
//! |---|---|
//! | [`args`] | what their command lines have in common |
//! | [`picture`] | a picture, and how pictures become a batch |
//! | [`augment`] | random crops and flips that every run repeats |
//! | `progress` | where a training is, as its checkpoints hold it |
//! | [`source`] | where the pictures come from: [`synthetic`], [`folder`], CIFAR-10 through Burn's dataset |
//! | [`resnet`], [`alexnet`] | the networks; [`norm`] is what the former is made of |
//! | [`train`] | training and evaluation over all ranks |

pub mod alexnet;
pub mod args;
pub mod augment;
#[cfg(feature = "download")]
mod cifar10;
pub mod folder;
pub mod norm;
pub mod picture;
mod progress;
pub mod resnet;
pub mod source;
pub mod synthetic;
pub mod train;

pub use alexnet::{AlexNet, AlexNetConfig};
pub use picture::{Batch, Channels, Picture};
pub use resnet::{ResNet, ResNetConfig};
pub use train::Classifier;
