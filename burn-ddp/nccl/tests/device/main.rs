//! Collectives on the device memory of a fake machine: results, refused arguments, the order of launches, and failures.

#![allow(missing_docs, unreachable_pub)]

mod common;
mod divide;
mod faults;
mod launch_order;
mod reduce;
mod refused_arguments;
