// The modules of the suite, for `include!` by the tests of each crate that has an engine.

mod agreement;
mod divided;
mod failure;
#[allow(dead_code, reason = "not every crate has ranks that meet over tcp or talk through shared memory")]
mod harness;
#[allow(dead_code, reason = "not every engine's means of unequal weights have the same bits")]
mod leaves;
mod numerics;
mod objects;
mod async_collectives;
mod rooted;
mod sequence;
mod splits;
mod suite;
mod out_of_step;
mod send_recv;
mod reference_values;
#[allow(dead_code, reason = "not every engine's means of unequal weights have the same bits")]
mod weighted_means;

use suite::conformance;
