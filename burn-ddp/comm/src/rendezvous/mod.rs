//! Rendezvous: how ranks of different processes find each other.
//!
//! 1. Rank 0 (or the launcher) hosts the [store](crate::store). All ranks connect to it, and prove to know the job's
//!    secret.
//! 2. Each rank posts its number and its address. The last rank to come posts the verdict: the table of all ranks. A
//!    rank that finds a fault, or whose deadline passes, posts that error as the verdict. The first verdict counts, so
//!    all ranks get the same one.
//! 3. Ranks of one machine connect with each other, and so do counterparts on two machines (see
//!    [`routes`](crate::membership::routes)): the higher rank of a pair connects to the lower one's listener. These are
//!    the control connections. Their key is derived from the job's key and a random token in the verdict, so that an
//!    eavesdropper cannot connect.
//! 4. If a rank ends before it has all of its connections, the store posts the error that the rank left there for this
//!    case, and the joins of the others fail. Before the verdict that happens only if no launcher watches the ranks: a
//!    launcher knows how the rank ended, and posts that.
//!
//! Keys in the store, below the job id: `{round}/rank/{r}` is a rank's [`Entry`], `{round}/arrived` the number of
//! entries, `{round}/first` the first entry, `{round}/verdict` the [`Verdict`](meeting_round), `{round}/lost`
//! the first failure after the verdict.
//! A process that joins again after it left finds its own entry in a round that has a verdict and takes the next round.

mod by_pmi;
mod control_connections;
pub(crate) mod meeting_round;
mod settings_check;
mod store_location;

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use self::control_connections::Neighbours;
pub use self::meeting_round::fail_join;
use self::meeting_round::{Entry, Met, Round, threads};
use self::settings_check::ComparedSettings;
use self::store_location::Agreed;
use crate::engine::Fabric;
use crate::engine::auto_fabric::{self, AutoFabric};
#[cfg(target_os = "linux")]
use crate::engine::shm::ShmFabric;
use crate::engine::tcp::{Reach, TcpFabric};
#[cfg(target_os = "linux")]
use crate::engine::two_level::TwoLevelFabric;
use crate::env::{LaunchEnv, Meeting};
use crate::membership::control::{self, Control, Directory};
use crate::membership::{Membership, Outbox, Wake};
use crate::net::bind_and_connect;
use crate::net::descriptors::{self, Room};
use crate::net::interface::Interface;
use crate::net::peer_addresses::PeerAddresses;
use crate::topology::Machines;
use crate::world::World;
use crate::world_member::Seat;
use crate::{Error, PeerInfo, Result, WorldOptions};

/// Shortest and longest time that a rank has to connect to its neighbours, once all ranks have come.
const MESH_TIME: std::ops::RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(60);

impl World {
    /// Joins the job that `env` describes, one process per rank (or one thread). Blocks until all ranks have come.
    ///
    /// Ranks of a group talk through shared memory if they share a machine and a user of it, and else over TCP, on
    /// connections of the group's own; a group on several machines uses both. [`WorldOptions::engine`] demands an
    /// engine for all groups. Ranks listen on [`LaunchEnv::interface`], or else on the interface through which they
    /// reach the master, which is loopback if the master's address is. A process that connects must prove to know the
    /// job's [`Secret`](crate::Secret); without a secret, ranks of one machine meet at a local socket.
    ///
    /// ```
    /// use burn_ddp_comm::{JobKey, LaunchEnv, Meeting, WorldOptions, ReduceOp, Secret, StoreServer, World};
    ///
    /// // The launcher's part: it makes a secret, hosts the store, and tells each rank its number.
    /// let (job, secret) = ("example", Secret::generate()?);
    /// let directory = tempfile::tempdir()?;
    /// let secret_file = directory.path().join("job.secret");
    /// secret.write_new(&secret_file)?;
    /// let store = StoreServer::bind("127.0.0.1:0", &JobKey::new(&secret, job, 0))?;
    /// let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port: store.local_addr().port() };
    /// let env = |rank| LaunchEnv {
    ///     secret_file: Some(secret_file.clone()),
    ///     ..LaunchEnv::new(rank, 2, meeting.clone(), job)
    /// };
    /// // The ranks' part, here as threads.
    /// std::thread::scope(|s| {
    ///     for rank in 0..2 {
    ///         let env = env(rank);
    ///         s.spawn(move || {
    ///             let world = World::join(&env, WorldOptions::default()).unwrap();
    ///             let mut x = [rank as f32, 1.0];
    ///             world.group().unwrap().all_reduce(&mut x, ReduceOp::Sum).unwrap();
    ///             assert_eq!(x, [1.0, 2.0]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Environment`] if `env` contradicts itself, rank 0 cannot listen at the master's address, or the master
    /// cannot be reached or refuses this process. [`Error::Rendezvous`], the same on all ranks, if within
    /// [`WorldOptions::join_timeout`] not all ranks came (the error lists both groups), a rank came twice, or ranks
    /// disagree about the world size, burn-ddp's version, [`timeout`](WorldOptions::timeout),
    /// [`heartbeat`](WorldOptions::heartbeat), [`peer_timeout`](WorldOptions::peer_timeout),
    /// [`engine`](WorldOptions::engine) or [`config`](WorldOptions::config).
    pub fn join(env: &LaunchEnv, options: WorldOptions) -> Result<World> {
        let seat = join(env, &options)?;
        Ok(World::from_seat(seat, options))
    }
}

/// Joins the world that `env` describes.
fn join(env: &LaunchEnv, options: &WorldOptions) -> Result<Seat> {
    check(env)?;
    options.check()?;
    descriptors::make_room(env.world_size);
    let start = Instant::now();
    let deadline = start + options.join_timeout.min(Duration::from_secs(365 * 24 * 3600));
    let Agreed { meeting, job, mut server } = match &env.meeting {
        Meeting::Pmi { fd, host } => by_pmi::agree(env, *fd, host, deadline)?,
        _ => {
            let meeting = store_location::meeting(env);
            Agreed { job: store_location::job_key(env, &meeting)?, meeting, server: None }
        }
    };
    // Ranks that meet at a local socket need no network interface.
    let via = match &env.interface {
        Some(name) if !matches!(meeting, Meeting::Local { .. }) => Interface::find(name)?,
        _ => Interface::default(),
    };
    let (hosted, store) = store_location::meet(env, &meeting, &job, &via, start, deadline)?;
    server = server.or(hosted);
    let local_ip = match via.listens(store.local_ip()) {
        Some(chosen) => chosen,
        None => store_location::local_ip(env, &meeting, &store)?,
    };
    let via = via.with_zone(store.zone());
    let (listener, listens) = control::listen(local_ip, &via).map_err(|e| {
        Error::environment(format!("cannot listen on {local_ip}, from which this machine reaches the master: {e}"))
    })?;
    let me = entry(env, options, listens, server.is_some());
    let is_watched = matches!(env.meeting, Meeting::Launcher { .. });
    let round = Round { store: &store, job: &job, me: &me, server: server.as_ref(), is_watched, start, deadline };
    // The verdict checks room for connections; this checks room for the store's clients, without which no verdict
    // comes.
    me.room.check(0, env.world_size).or_else(|why| round.give_up(&why))?;
    let met = round.attend()?;
    let Met { token, entries, .. } = &met;
    let places: Vec<_> = entries.iter().map(|entry| (&entry.peer, entry.memory.as_deref())).collect();
    auto_fabric::check(options.engine, &places)?;

    let key = job.links(token);
    let control = Control::start(listener, env.rank, env.world_size, key.clone()).map_err(threads)?;
    let mesh_end =
        Instant::now() + deadline.saturating_duration_since(Instant::now()).clamp(*MESH_TIME.start(), *MESH_TIME.end());
    let machines = Machines::new(&entries.iter().map(|entry| &entry.machine).collect::<Vec<_>>());
    if let Some(name) = &env.machine {
        tracing::info!(rank = env.rank, name, ?machines, "BURN_DDP_MACHINE cuts hosts into machines");
    }
    let peers: Vec<PeerInfo> = entries.iter().map(|entry| entry.peer.clone()).collect();
    let membership = Membership::new(env.rank, peers.clone(), machines.clone(), options.clone());
    let memories: Vec<_> = entries.iter().map(|entry| entry.memory.clone()).collect();
    let control = Arc::new(control);
    let mut streams: Vec<_> = entries.iter().map(|_| None).collect();
    let addresses = PeerAddresses::new(entries.iter().map(|entry| (entry.host.clone(), entry.port)));
    let (routes, to) = (membership.routes(), &addresses);
    let neighbours = Neighbours { control: &control, key: &key, to, via: &via, routes };
    let connected = neighbours.connect(&round, &met, mesh_end, &mut streams);
    let as_outbox: Arc<dyn Outbox> = control.clone();
    membership.set_outbox(Arc::downgrade(&as_outbox));
    let links: Weak<dyn Wake> = Arc::downgrade(control.links()) as Weak<dyn Wake>;
    membership.add_waker(links);
    let directory = Directory { addresses: addresses.clone(), via: via.clone() };
    control.attach(streams, membership.clone(), directory).map_err(threads)?;
    if let Err(error) = connected {
        let error = round.cannot_connect(&met, error);
        // Neighbours that have all of their connections do not ask the store any more: they hear the failure here.
        membership.fail(error.clone());
        membership.goodbye();
        return Err(error);
    }
    membership.report_to(env);
    round.joined();
    addresses.look_up_all();
    tracing::debug!(rank = env.rank, world_size = env.world_size, elapsed = ?start.elapsed(), "joined");

    #[cfg(target_os = "linux")]
    let shm = Arc::new(ShmFabric::new(key.clone(), membership.clone()));
    let reach = Reach { rank: env.rank, addresses, key, via, links: control.links().clone() };
    let tcp = Arc::new(TcpFabric::new(reach, membership.clone()));
    #[cfg(target_os = "linux")]
    let (shm, two_level) = {
        let two_level = TwoLevelFabric::new(memories.clone(), shm.clone(), tcp.clone(), membership.clone());
        (Some(shm as Arc<dyn Fabric>), Some(Arc::new(two_level) as Arc<dyn Fabric>))
    };
    #[cfg(not(target_os = "linux"))]
    let (shm, two_level) = (None, None);
    Ok(Seat {
        rank: env.rank,
        local_world_size: env.local_world_size,
        machines,
        peers,
        membership,
        fabric: Arc::new(AutoFabric::new(memories, options.engine, shm, tcp, two_level)),
        keep_alive: Some(Box::new((control, server))),
    })
}

/// Entry of the rank that `env` describes, which listens at `listens`, and hosts the store if `hosts`.
fn entry(env: &LaunchEnv, options: &WorldOptions, listens: SocketAddr, hosts: bool) -> Entry {
    let memory = auto_fabric::machine(env.machine.as_deref());
    Entry {
        peer: PeerInfo::here(env.rank, env.local_rank, env.node_rank),
        world_size: env.world_size,
        host: env.advertise.clone().unwrap_or_else(|| listens.ip().to_string()),
        port: listens.port(),
        machine: machine_of(env, memory.as_deref()),
        memory,
        config: ComparedSettings::of(options),
        room: Room::here(if hosts { env.world_size - 1 } else { 0 }),
    }
}

/// Identity of this rank's machine: that of its shared memory, or else the names of the host and the machine.
fn machine_of(env: &LaunchEnv, memory: Option<&str>) -> String {
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    memory.map_or_else(|| format!("{} {}", host(), env.machine.as_deref().unwrap_or_default()), str::to_owned)
}

/// Checks `env`, which a program can make by hand.
fn check(env: &LaunchEnv) -> Result<()> {
    if env.rank >= env.world_size || env.local_rank >= env.local_world_size || env.local_world_size > env.world_size {
        return Err(Error::environment(format!(
            "rank {} of {}, local rank {} of {} contradict each other",
            env.rank, env.world_size, env.local_rank, env.local_world_size
        )));
    }
    let far = env.local_world_size < env.world_size;
    let elsewhere = env.world_size - env.local_world_size;
    if let Meeting::Local { name } = &env.meeting
        && far
    {
        return Err(Error::environment(format!(
            "the ranks meet at the local socket {name:?}, but {elsewhere} of {} run on other machines",
            env.world_size
        )));
    }
    // Launchers on several machines have met at that address themselves; by_pmi checks that rank 0 hosts no loopback
    // store.
    let reachable = matches!(env.meeting, Meeting::Launcher { .. } | Meeting::Pmi { .. });
    if far && !reachable && bind_and_connect::is_loopback(env.meeting.host()) {
        let host = env.meeting.host();
        return Err(Error::environment(format!(
            "the master is {host}, which only ranks on its own machine can reach, but {} of {} ranks run elsewhere; \
             give the name or address of rank 0's machine",
            elsewhere, env.world_size
        )));
    }
    Ok(())
}
