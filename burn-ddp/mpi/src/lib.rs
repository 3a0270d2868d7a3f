//! The collectives of burn-ddp over an installed MPI, for clusters whose network MPI knows best.
//!
//! [`attach`] has a world's groups use MPI from then on. Everything else stays as it is: the same calls, errors and deadlines, and
//! the same bits.
//!
//! ```no_run
//! use burn_ddp_comm::{WorldOptions, ReduceOp, World};
//!
//! // mpirun -n 4 target/release/program
//! let env = burn_ddp_mpi::detect()?.expect("started by mpirun");
//! let world = World::join(&env, WorldOptions::from_env()?)?;
//! burn_ddp_mpi::attach(&world)?;
//! assert_eq!(world.engine(), "mpi");
//!
//! let group = world.group()?;
//! let mut x = [world.rank() as f32];
//! group.all_reduce(&mut x, ReduceOp::Mean)?;
//! # Ok::<(), burn_ddp_comm::Error>(())
//! ```
//!
//! MPI carries messages from rank to rank, no more: the algorithms are those of [`HostEngine`], which the `tcp` engine has too. So sums
//! have the same bits as over threads, shared memory and tcp, under every MPI and on any number of machines; every rank's call is
//! compared with every other's; and a wait ends at its deadline, or as soon as a rank is known to be lost. No call that MPI blocks in
//! is made while a group lives.
//!
//! # Map
//!
//! | what | where |
//! |---|---|
//! | joining an MPI job | [`detect`], [`attach`] |
//! | where ranks meet whose launcher MPI keeps busy | `detect.rs` |
//! | groups: one communicator per world, tags of its own for each group | `fabric.rs` |
//! | frames: the transport and the loop that waits | `transport.rs`, `exchange.rs` |
//! | how frames are cut into messages | `fragments.rs` |
//! | what a wait does when nothing moves | `idle.rs` |
//! | beginning and ending MPI | `lifecycle.rs` |
//! | the calls of MPI, and all `unsafe` | `ffi.rs` |
//!
//! # The end
//!
//! MPI is finalized when the process ends by `exit` or by returning from `main`, and only if all its ranks left worlds that were whole,
//! without groups still open. Finalizing waits for all ranks, for as long as a collective may take ([`WorldOptions::timeout`]). Otherwise MPI is
//! left as it is: then nothing can hang, and `mpirun` sees a rank that failed, as it should.
//!
//! [`WorldOptions::timeout`]: burn_ddp_comm::WorldOptions::timeout
#![deny(unsafe_code)]

mod exchange;
mod fabric;
mod ffi;
mod idle;
mod detect;
mod fragments;
mod lifecycle;
mod transport;

use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

use burn_ddp_comm::engine::{Engine, Fabric, HostEngine};
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, CallInfo, CallSite, Collective, Error, Members, PeerInfo, Result, World};

use self::exchange::Route;
use self::fabric::{MpiFabric, Ranks};
use self::ffi::{Comm, Failure};
use self::idle::Idle;
use self::transport::MpiTransport;

pub use self::detect::detect;

/// Has all later groups of `world` use MPI. All ranks call it, between the same groups; it returns when all have.
///
/// MPI is initialised if it is not yet, so that any thread may use it; a program that does so itself asks for
/// `MPI_THREAD_MULTIPLE`. Each rank is a process of its own, started by the `mpirun` of the MPI that this program was built with.
///
/// # Errors
/// Whatever goes wrong on a rank ends the world, on all of them. [`Error::Environment`] if MPI cannot be used, or was not started with the
/// ranks of this world; [`Error::Timeout`] naming the ranks that did not come within [`WorldOptions::join_timeout`].
///
/// [`WorldOptions::join_timeout`]: burn_ddp_comm::WorldOptions::join_timeout
#[track_caller]
pub fn attach(world: &World) -> Result<()> {
    let site = CallSite::from(Location::caller());
    world.set_fabric(|_, membership| {
        let attached = attached(world, &membership, site);
        match &attached {
            // Others have to be told whose trouble it is.
            Err(error @ Error::Environment { .. }) => world.fail(format!("it cannot use MPI: {error}")),
            Err(error) => membership.fail(error.clone()),
            Ok(_) => {}
        }
        attached
    })
}

/// Has all ranks of one process talk to each other over MPI: how the engine is tested without a launcher.
///
/// # Errors
/// [`Error::Environment`] if MPI cannot be used.
#[doc(hidden)]
pub fn attach_threads(worlds: &[World]) -> Result<()> {
    let Some(first) = worlds.first() else { return Ok(()) };
    lifecycle::begin(first.options().join_timeout, &|| first.check())?;
    let comm = {
        let _one = lifecycle::one_at_a_time();
        Arc::new(Comm::of_this_process().map_err(refused)?)
    };
    for world in worlds {
        world.set_fabric(|_, membership| {
            lifecycle::register(&membership, world.options().timeout);
            Ok::<_, Error>(Arc::new(MpiFabric::new(comm.clone(), membership, Ranks::Threads)) as Arc<dyn Fabric>)
        })?;
    }
    Ok(())
}

fn attached(world: &World, membership: &Arc<Membership>, site: CallSite) -> Result<Arc<dyn Fabric>> {
    if detect::is_taken() && !lifecycle::has_begun() {
        return Err(Error::Environment { message: detect::TOO_LATE.to_owned() });
    }
    lifecycle::begin(world.options().join_timeout, &|| world.check())?;
    let _one = lifecycle::one_at_a_time();
    let all = Arc::new(Comm::world().map_err(refused)?);
    check_place(world, &all)?;
    let info = CallInfo::bare(Collective::NewGroup, 0, 0, site);
    let members = Arc::new(Members::all(world.world_size()));
    let call = Call::new(info, members, world.rank(), world.options().join_timeout);
    meet(world, membership, &all, &call)?;
    let comm = duplicate(&all, membership, &call)?;
    lifecycle::register(membership, world.options().timeout);
    Ok(Arc::new(MpiFabric::new(Arc::new(comm), membership.clone(), Ranks::Processes)))
}

/// Whether MPI and the world say the same about this process.
fn check_place(world: &World, all: &Comm) -> Result<()> {
    let (rank, size) = (world.rank(), world.world_size());
    let (mpi_rank, mpi_size) = (all.rank() as usize, all.size() as usize);
    if (rank, size) == (mpi_rank, mpi_size) {
        return Ok(());
    }
    let library = ffi::library();
    let message = if mpi_size == 1 && size > 1 {
        format!(
            "{library} was started with this process alone, but there are {size} ranks: start them by the mpirun that belongs to it, or build this program with the MPI (MPICC=…) whose mpirun you use"
        )
    } else {
        format!(
            "to {library} this process is rank {mpi_rank} of {mpi_size}, but here it is rank {rank} of {size}: start the ranks by its mpirun, and set no variables that say otherwise"
        )
    };
    Err(Error::Environment { message })
}

/// Bytes by which processes know each other: a number, and the end of a name.
const NAME_BYTES: usize = 64;

/// All ranks are here, and MPI's are those of the world. Missing ones are named, which MPI could not do.
fn meet(world: &World, membership: &Arc<Membership>, all: &Arc<Comm>, call: &Call) -> Result<()> {
    let tag = all.tag_max();
    let route = |rank: usize| Route { process: rank as std::ffi::c_int, send: tag, receive: tag };
    let routes = (0..world.world_size()).map(route).collect();
    let transport = MpiTransport::new(world.rank(), routes, all.clone(), membership.clone(), false)?;
    let mut names = vec![[0; NAME_BYTES]; world.world_size()];
    let mut outputs: Vec<&mut [u8]> = names.iter_mut().map(|name| name.as_mut_slice()).collect();
    let peers = world.peers();
    HostEngine::new(transport).all_gather(call, &name(&peers[world.rank()]), &mut outputs)?;
    match peers.iter().zip(&names).find(|(peer, told)| name(peer) != **told) {
        None => Ok(()),
        Some((peer, _)) => Err(Error::Environment {
            message: format!("{peer} is not rank {} to MPI: were the ranks started by two launchers?", peer.rank),
        }),
    }
}

fn name(peer: &PeerInfo) -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    let host = peer.host.as_bytes();
    let host = &host[host.len().saturating_sub(NAME_BYTES - 4)..];
    name[..4].copy_from_slice(&peer.pid.to_le_bytes());
    name[4..4 + host.len()].copy_from_slice(host);
    name
}

/// A communicator of the world's own, so that its messages and the program's are kept apart.
fn duplicate(all: &Comm, membership: &Arc<Membership>, call: &Call) -> Result<Comm> {
    let mut idle = Idle::new(membership.rank(), membership.peers());
    let mut duplication = all.duplicate().map_err(refused)?;
    loop {
        if let Some(comm) = duplication.test().map_err(refused)? {
            return Ok(comm);
        }
        membership.check()?;
        if Instant::now() >= call.deadline() {
            return Err(call.timed_out((0..call.members.count()).filter(|rank| *rank != call.rank).collect()));
        }
        idle.pause();
    }
}

fn refused(failure: Failure) -> Error {
    Error::Environment { message: format!("{}: {failure}", ffi::library()) }
}
