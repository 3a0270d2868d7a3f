//! The trainers for pictures, `resnet` and `alexnet`.
//!
//! | | |
//! |---|---|
//! | [`picture`] | a picture, and how pictures become a batch |
//! | [`augment`] | random crops and flips that every run repeats |
//! | `picture_source` | sources of the pictures: [`synthetic`], a `folder` (crate feature `images`), `cifar10` (`download`) |
//! | [`resnet`], [`alexnet`] | the networks; [`conv_norm`] is the part of which the former is made |
//! | [`train_pictures`] | options, data and loss for the [trainer](crate::trainer) |

pub mod alexnet;
pub mod augment;
#[cfg(feature = "download")]
mod cifar10;
pub mod conv_norm;
#[cfg(feature = "images")]
pub mod folder;
pub mod picture;
mod picture_source;
pub mod resnet;
pub mod synthetic;
pub mod train_pictures;

pub use alexnet::{AlexNet, AlexNetConfig};
pub use picture::{Batch, Channels, Picture};
pub use resnet::{ResNet, ResNetConfig};
pub use train_pictures::{Classifier, PictureArgs};
