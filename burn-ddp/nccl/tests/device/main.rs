//! Reductions of what is on devices, of a machine that is a fake: the right numbers, the same order of launches
//! everywhere, and what happens when something fails.

#![allow(missing_docs, unreachable_pub)]

mod common;
mod faults;
mod launch_order;
mod reduce;
