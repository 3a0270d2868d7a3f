// The modules of the suite, for `include!` by the tests of each crate that has an engine.

mod agreement;
mod failure;
#[allow(dead_code, reason = "not every crate has ranks that meet over tcp or talk through shared memory")]
mod harness;
mod numerics;
mod objects;
mod pending;
mod rooted;
mod sequence;
mod splits;
mod suite;
mod out_of_step;
mod transfers;
mod reference_values;
#[allow(dead_code, reason = "not every engine's means of unequal weights have the same bits")]
mod weights;

use suite::conformance;
