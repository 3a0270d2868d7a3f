//! What every engine must do, over NCCL for everything, on a machine that is a fake.
//!
//! The fake reduces as burn-ddp's host engines do, so bits can be compared; NCCL itself adds in another order. Means of unequal weights are
//! different even so: factors come before the sum, not after it. See `weights_make_shares` in `tests/device`.

#![allow(missing_docs, unreachable_pub)]

#[path = "../../comm/tests/conformance/agreement.rs"]
mod agreement;
#[path = "../../comm/tests/conformance/failure.rs"]
mod failure;
#[path = "../../comm/tests/conformance/harness.rs"]
#[allow(dead_code)]
mod harness;
#[path = "../../comm/tests/conformance/numerics.rs"]
mod numerics;
#[path = "../../comm/tests/conformance/objects.rs"]
mod objects;
#[path = "../../comm/tests/conformance/pending.rs"]
mod pending;
#[path = "../../comm/tests/conformance/rooted.rs"]
mod rooted;
#[path = "../../comm/tests/conformance/sequence.rs"]
mod sequence;
#[path = "../../comm/tests/conformance/splits.rs"]
mod splits;
#[path = "../../comm/tests/conformance/suite.rs"]
mod suite;
#[path = "../../comm/tests/conformance/tracks.rs"]
mod tracks;
#[path = "../../comm/tests/conformance/transfers.rs"]
mod transfers;
#[path = "../../comm/tests/conformance/values.rs"]
mod values;

use std::sync::Arc;

use burn_ddp_comm::{WorldOptions, World};
use burn_ddp_nccl::fake::Machine;
use burn_ddp_nccl::{Device, HostMemory, NcclFabric};
use suite::conformance;

/// Ranks in one process, each with a device of one machine.
fn through_device(n: usize, options: WorldOptions) -> Vec<World> {
    let machine = Machine::new(n);
    let worlds = World::threads(n, options);
    for (rank, world) in worlds.iter().enumerate() {
        world
            .set_fabric(|own, membership| {
                let device = Device::new(&machine.driver(), rank)?;
                let fabric = NcclFabric::new(own, membership, machine.nccl(), device, HostMemory::ThroughDevice)?;
                Ok::<_, burn_ddp_comm::Error>(Arc::new(fabric) as _)
            })
            .expect("a fabric");
    }
    worlds
}

mod nccl {
    crate::conformance!(crate::through_device; but the means of unequal weights);
}
