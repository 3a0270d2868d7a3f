//! Ranks of different processes find each other.
//!
//! 1. Rank 0 (or the launcher) hosts the [store](crate::store); everybody connects to it, and proves to know the job's secret.
//! 2. Each rank posts who it is and where it listens. The last one to come posts the verdict: the table of all ranks. A rank that
//!    finds a fault, or whose time is over, posts that instead. Only the first verdict counts, so all ranks get the same.
//! 3. Of each pair of ranks the higher one connects to the lower one's listener: that is the control connection. Its key follows from the
//!    job's and a random token in the verdict, so that who merely saw the traffic cannot connect.
//!
//! Keys, below the job id: `{round}/rank/{r}` is a rank's [`Entry`], `{round}/arrived` their number, `{round}/first` the first entry, `{round}/verdict` the [`Verdict`].
//! A process that joins again, after it left, finds its own entry in a decided round and takes the next.

mod by_pmi;

use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::control::{self, Control};
use crate::engine::tcp::{Reach, TcpFabric};
use crate::env::{LaunchEnv, Meeting};
use crate::health::{Health, Outbox, Wake};
use crate::job_key::LinkKey;
use crate::net::handshake::{HANDSHAKE_DEADLINE, Introduction, Purpose, Refusal, Role, introduce};
use crate::net::key::{KEY_BYTES, random};
use crate::net::{address, local};
use crate::store::{Place, Serving, Store, StoreClient, Unreached};
use crate::world::{Seat, World};
use crate::{Error, JobKey, Options, PeerInfo, Result, Secret};

/// How many ports above torchrun's rank 0 may choose from.
pub(crate) const PORTS_ABOVE: u16 = 64;
/// What connecting to the peers gets at least, and at most, once all are known to be there.
const MESH_TIME: std::ops::RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(60);
/// Rounds of one job in one store; more would be a program that joins in a loop.
const ROUNDS_CAP: u32 = 10_000;

/// One rank, as it posts itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    peer: PeerInfo,
    world_size: usize,
    /// Where it listens.
    host: String,
    port: u16,
}

/// How a round ends.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Verdict {
    /// All are there.
    Complete {
        /// Random: with the job's key it yields that of this world's connections.
        token: [u8; KEY_BYTES],
        entries: Vec<Entry>,
    },
    /// They did not come together.
    Failed(Error),
}

impl World {
    /// Joins the job that `env` describes, one process per rank (or one thread). Blocks until all ranks have come.
    ///
    /// The ranks talk over TCP: each to each, over a connection per pair and group. They listen on the interface through which they
    /// reach the master, on loopback if the master is this machine by name.
    ///
    /// ```
    /// use burn_ddp_comm::{JobKey, LaunchEnv, Meeting, Options, ReduceOp, Secret, StoreServer, World};
    ///
    /// // What the launcher does: it makes a secret, hosts the store, and tells each rank who it is.
    /// let (job, secret) = ("example", Secret::generate()?);
    /// let secret_file = std::env::temp_dir().join(format!("burn-ddp-{}.secret", std::process::id()));
    /// secret.write_new(&secret_file)?;
    /// let store = StoreServer::bind("127.0.0.1:0", &JobKey::new(&secret, job, 0))?;
    /// let meeting = Meeting::Launcher { host: "127.0.0.1".into(), port: store.local_addr().port() };
    /// let env = |rank| LaunchEnv {
    ///     secret_file: Some(secret_file.clone()),
    ///     ..LaunchEnv::new(rank, 2, meeting.clone(), job)
    /// };
    /// // What each rank does, here as threads.
    /// std::thread::scope(|s| {
    ///     for rank in 0..2 {
    ///         let env = env(rank);
    ///         s.spawn(move || {
    ///             let world = World::join(&env, Options::default()).unwrap();
    ///             let mut x = [rank as f32, 1.0];
    ///             world.group().unwrap().all_reduce(&mut x, ReduceOp::Sum).unwrap();
    ///             assert_eq!(x, [1.0, 2.0]);
    ///         });
    ///     }
    /// });
    /// # std::fs::remove_file(secret_file).unwrap();
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Environment`] if `env` contradicts itself, rank 0 cannot listen at the master's address, or the master cannot be reached
    /// or refuses this process. [`Error::Rendezvous`], the same on all ranks, if within [`Options::join_timeout`] not all ranks came
    /// (lists who did and who did not), a rank came twice, or ranks disagree about the world size.
    pub fn join(env: &LaunchEnv, options: Options) -> Result<World> {
        let seat = join(env, &options)?;
        Ok(World::from_seat(seat, options))
    }
}

/// Joins the world that `env` describes.
fn join(env: &LaunchEnv, options: &Options) -> Result<Seat> {
    check(env)?;
    options.check()?;
    let start = Instant::now();
    let deadline = start + options.join_timeout.min(Duration::from_secs(365 * 24 * 3600));
    let Agreed { meeting, job, mut server } = match &env.meeting {
        Meeting::Pmi { fd, host } => by_pmi::agree(env, *fd, host, deadline)?,
        _ => {
            let meeting = meeting(env);
            Agreed { job: job_key(env, &meeting)?, meeting, server: None }
        }
    };
    let (hosted, store) = meet(env, &meeting, &job, start, deadline)?;
    server = server.or(hosted);
    let (listener, listens) = control::listen(store.local_ip()).map_err(|e| {
        environment(format!("cannot listen on {}, from where the master is reached: {e}", store.local_ip()))
    })?;
    let me = Entry {
        peer: PeerInfo::here(env.rank, env.local_rank, env.node_rank),
        world_size: env.world_size,
        host: listens.ip().to_string(),
        port: listens.port(),
    };
    let round = Round { store: &store, job: job.name(), me: &me, start, deadline };
    let (token, entries) = round.attend()?;

    let key = job.links(&token);
    let control = Control::start(listener, env.rank, env.world_size, key.clone()).map_err(threads)?;
    let mesh_end =
        Instant::now() + deadline.saturating_duration_since(Instant::now()).clamp(*MESH_TIME.start(), *MESH_TIME.end());
    let streams = connect_all(&control, &key, env.rank, &entries, mesh_end)?;
    let peers: Vec<PeerInfo> = entries.iter().map(|entry| entry.peer.clone()).collect();
    let health = Health::new(env.rank, peers.clone(), options.clone());
    health.report_to(env);
    let control = Arc::new(control);
    let as_outbox: Arc<dyn Outbox> = control.clone();
    health.set_outbox(Arc::downgrade(&as_outbox));
    let links: Weak<dyn Wake> = Arc::downgrade(control.links()) as Weak<dyn Wake>;
    health.add_waker(links);
    control.attach(streams, health.clone()).map_err(threads)?;
    tracing::debug!(rank = env.rank, world_size = env.world_size, elapsed = ?start.elapsed(), "joined");

    let reach = Reach {
        rank: env.rank,
        addresses: entries.into_iter().map(|entry| (entry.host, entry.port)).collect(),
        key,
        links: control.links().clone(),
    };
    Ok(Seat {
        rank: env.rank,
        local_world_size: env.local_world_size,
        peers,
        health: health.clone(),
        fabric: Box::new(TcpFabric::new(reach, health)),
        keep_alive: Some(Box::new((control, server))),
    })
}

/// Where the ranks meet, and what admits to it.
struct Agreed {
    meeting: Meeting,
    job: JobKey,
    /// The store, if this rank hosts it and it is there already.
    server: Option<Serving>,
}

/// `LaunchEnv` can be made by hand.
fn check(env: &LaunchEnv) -> Result<()> {
    if env.rank >= env.world_size || env.local_rank >= env.local_world_size || env.local_world_size > env.world_size {
        return Err(environment(format!(
            "rank {} of {}, local rank {} of {} contradict each other",
            env.rank, env.world_size, env.local_rank, env.local_world_size
        )));
    }
    let far = env.local_world_size < env.world_size;
    let elsewhere = env.world_size - env.local_world_size;
    if let Meeting::Local { name } = &env.meeting
        && far
    {
        return Err(environment(format!(
            "the ranks meet at the local socket {name:?}, but {elsewhere} of {} run on other machines",
            env.world_size
        )));
    }
    // Launchers have met there themselves, and a process manager says it later.
    let reachable = matches!(env.meeting, Meeting::Launcher { .. } | Meeting::Pmi { .. });
    if far && !reachable && address::is_loopback(env.meeting.host()) {
        let host = env.meeting.host();
        return Err(environment(format!(
            "the master is {host}, which only ranks on its own machine can reach, but {} of {} ranks run elsewhere; give the name or address of rank 0's machine",
            elsewhere, env.world_size
        )));
    }
    Ok(())
}

/// Where the ranks of `env` meet.
///
/// Ranks that all run here need no port. Without a secret a port would let strangers in, so it only names a local socket.
fn meeting(env: &LaunchEnv) -> Meeting {
    let is_secret = env.secret_file.is_some() || env.trust_network;
    let is_here = env.local_world_size == env.world_size && address::is_loopback(env.meeting.host());
    match &env.meeting {
        Meeting::Rank0 { port, .. } | Meeting::Rank0Above { port, .. } if is_here && !is_secret => {
            Meeting::Local { name: format!("{}, port {port}", env.job_id) }
        }
        other => other.clone(),
    }
}

/// What admits to the job whose ranks meet there.
fn job_key(env: &LaunchEnv, meeting: &Meeting) -> Result<JobKey> {
    let trusting = JobKey::trusting_network(&env.job_id, env.restart_count);
    match &env.secret_file {
        Some(path) => Ok(JobKey::new(&Secret::read(path)?, &env.job_id, env.restart_count)),
        None if env.trust_network => Ok(trusting),
        // The local socket keeps others out; the key of the connections between ranks is random and passes through it.
        None if matches!(meeting, Meeting::Local { .. }) => Ok(trusting),
        None => Err(environment(format!(
            "the ranks would meet at {meeting} without a secret, so that any stranger could join; run `burnrun secret FILE`, copy FILE to each machine and set BURN_DDP_SECRET_FILE=FILE there, or set BURN_DDP_TRUST_NETWORK=1 if nobody else can reach these machines"
        ))),
    }
}

/// Hosts the store, if that is this rank's part, and connects to it.
fn meet(
    env: &LaunchEnv,
    meeting: &Meeting,
    job: &JobKey,
    start: Instant,
    deadline: Instant,
) -> Result<(Option<Serving>, StoreClient)> {
    let hosts = env.rank == 0;
    let (host, port, above) = match meeting {
        Meeting::Local { name } => {
            let server = if hosts { Some(host_local(name, job)?) } else { None };
            return Ok((server, find_store(&[Place::Local { name: name.clone() }], env, job, start, deadline)?));
        }
        Meeting::Pmi { .. } => {
            return Err(Error::Internal { message: "a process manager's ranks agreed on no place".into() });
        }
        Meeting::Launcher { host, port } => {
            let place = Place::Tcp { host: host.clone(), port: *port };
            return Ok((None, find_store(&[place], env, job, start, deadline)?));
        }
        Meeting::Rank0 { host, port } => (host, port, false),
        Meeting::Rank0Above { host, port } => (host, port, true),
    };
    let mut ports: Vec<u16> =
        if above { (1..=PORTS_ABOVE).filter_map(|above| port.checked_add(above)).collect() } else { vec![*port] };
    let mut server = None;
    if hosts {
        let (serving, port) = host_store(host, &ports, env, job)?;
        server = Some(serving);
        ports = vec![port];
    }
    let places: Vec<Place> = ports.into_iter().map(|port| Place::Tcp { host: host.clone(), port }).collect();
    Ok((server, find_store(&places, env, job, start, deadline)?))
}

/// Hosts the store where only processes of this user on this machine come.
fn host_local(name: &str, job: &JobKey) -> Result<Serving> {
    // The process that had the name may be just ending.
    let give_up = Instant::now() + Duration::from_secs(1);
    loop {
        match local::bind(name).and_then(|listener| Serving::start(listener, job)) {
            Ok(serving) => return Ok(serving),
            Err(e) if e.kind() == ErrorKind::AddrInUse && Instant::now() < give_up => {
                std::thread::sleep(address::RETRY)
            }
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                return Err(environment(format!(
                    "another process serves the local socket {name:?} already: is this job started twice, or does rank 0 of an earlier one still run?"
                )));
            }
            Err(e) => return Err(environment(format!("rank 0 cannot host the store at local socket {name:?}: {e}"))),
        }
    }
}

/// Hosts the store on the first free one of `ports`.
fn host_store(host: &str, ports: &[u16], env: &LaunchEnv, job: &JobKey) -> Result<(Serving, u16)> {
    let far = env.local_world_size < env.world_size;
    let mut addresses = address::resolve(host, 0).into_iter().flatten().peekable();
    if far && addresses.peek().is_some() && addresses.all(|address| address.ip().is_loopback()) {
        return Err(environment(format!(
            "{host} means loopback on rank 0's machine, where ranks on other machines cannot come; give an address instead of the name"
        )));
    }
    let mut failure = std::io::Error::other("there is no such port");
    for port in ports {
        // With one port it is worth waiting for the process that had it to end; with many the next one is.
        let bound = if ports.len() == 1 { address::bind(host, *port) } else { address::bind_once(host, *port) };
        match bound.and_then(|listener| Serving::start(listener, job)) {
            Ok(server) => return Ok((server, *port)),
            Err(e) => failure = e,
        }
    }
    let place = match ports {
        [port] => address::join(host, *port),
        _ => format!("{host}, ports {}-{}", ports.first().unwrap_or(&0), ports.last().unwrap_or(&0)),
    };
    let advice = match failure.kind() {
        ErrorKind::AddrInUse => {
            "; another job, or what is left of an earlier one, listens there: end it, or choose another port for MASTER_PORT (or BURN_DDP_MASTER)"
        }
        ErrorKind::AddrNotAvailable => "; that is no address of this machine: rank 0 must run on the master",
        ErrorKind::PermissionDenied => {
            "; ports below 1024 are reserved: choose another for MASTER_PORT (or BURN_DDP_MASTER)"
        }
        _ => "",
    };
    Err(environment(format!("rank 0 cannot host the store at {place}: {failure}{advice}")))
}

/// Connects to this job's store at one of `places`; tries again until the deadline.
fn find_store(
    places: &[Place],
    env: &LaunchEnv,
    job: &JobKey,
    start: Instant,
    deadline: Instant,
) -> Result<StoreClient> {
    // Where there are several ports, whoever is silent on one of them should not keep us from the next for long.
    let mut patience = if places.len() == 1 { HANDSHAKE_DEADLINE } else { HANDSHAKE_DEADLINE / 10 };
    let mut failure = String::new();
    loop {
        for place in places {
            match StoreClient::try_connect(place, job, deadline, patience) {
                Ok(store) => return Ok(store),
                Err(Unreached::Refused(cause)) if places.len() == 1 => {
                    return Err(environment(format!(
                        "the store at {place} refused rank {} of job {:?}: {cause}",
                        env.rank,
                        job.name()
                    )));
                }
                // A neighbour's port may well be another job's.
                Err(Unreached::Refused(cause) | Unreached::Absent(cause)) => {
                    // What the deadline itself cut short says less than what came before.
                    if failure.is_empty() || Instant::now() < deadline {
                        failure = format!("{place}: {cause}");
                    }
                }
            }
        }
        if Instant::now() + address::RETRY >= deadline {
            let who = if matches!(env.meeting, Meeting::Launcher { .. }) { "the launcher" } else { "rank 0" };
            let port = if matches!(env.meeting, Meeting::Local { .. }) { "" } else { ", and is the port open" };
            let message = format!(
                "rank {} could not reach the master at {} within {:.1} s (last attempt: {failure}); is {who} running there{port}?",
                env.rank,
                env.meeting,
                start.elapsed().as_secs_f64()
            );
            return Err(environment(message));
        }
        patience = HANDSHAKE_DEADLINE.min(2 * patience);
        std::thread::sleep(address::RETRY);
    }
}

/// One rank's part in coming together.
struct Round<'a> {
    store: &'a StoreClient,
    job: &'a str,
    me: &'a Entry,
    start: Instant,
    deadline: Instant,
}

impl Round<'_> {
    /// Posts this rank, and waits for the verdict: the token and all entries, by rank.
    fn attend(&self) -> Result<([u8; KEY_BYTES], Vec<Entry>)> {
        let number = self.post()?;
        if self.store.add(&self.key(number, "arrived"), 1)? == self.me.world_size as i64 {
            let verdict = self.complete(number)?;
            self.decide(number, &verdict)?;
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let verdict = match self.store.get(&self.key(number, "verdict"), left) {
            Ok(bytes) => decode(&bytes)?,
            // Somebody may have come at the last moment: what counts is the first verdict.
            Err(Error::StoreTimeout { .. }) => self.decide(number, &Verdict::Failed(self.missed(number)?))?,
            Err(e) => return Err(e),
        };
        match verdict {
            Verdict::Complete { token, entries } => Ok((token, entries)),
            Verdict::Failed(error) => Err(error),
        }
    }

    /// Posts this rank in the first round that is open to it; the round's number.
    fn post(&self) -> Result<u32> {
        let mine = encode(self.me)?;
        for number in 0..ROUNDS_CAP {
            let Some(there) = self.store.set_new(&self.key(number, &format!("rank/{}", self.me.peer.rank)), &mine)?
            else {
                self.agree_on_size(number, &mine)?;
                return Ok(number);
            };
            let there: Entry = decode(&there)?;
            let decided = self.store.get(&self.key(number, "verdict"), Duration::ZERO).is_ok();
            let same_process = (&there.peer.host, there.peer.pid) == (&self.me.peer.host, self.me.peer.pid);
            if !(decided && same_process) {
                let message = format!(
                    "rank {} was started twice: by {} and by process {} on {}; each process needs a rank of its own",
                    self.me.peer.rank, there.peer, self.me.peer.pid, self.me.peer.host
                );
                let error = Error::Rendezvous { message, came: Vec::new(), missing: Vec::new() };
                self.decide(number, &Verdict::Failed(error.clone()))?;
                return Err(error);
            }
        }
        Err(environment(format!("this process has joined {ROUNDS_CAP} times")))
    }

    /// The first one to come says how many are to come.
    fn agree_on_size(&self, number: u32, mine: &[u8]) -> Result<()> {
        let Some(first) = self.store.set_new(&self.key(number, "first"), mine)? else { return Ok(()) };
        let first: Entry = decode(&first)?;
        if first.world_size == self.me.world_size {
            return Ok(());
        }
        let message = format!(
            "ranks disagree about the world size: {} says {}, {} says {}; WORLD_SIZE must be the same everywhere",
            first.peer, first.world_size, self.me.peer, self.me.world_size
        );
        let error = Error::Rendezvous { message, came: Vec::new(), missing: Vec::new() };
        self.decide(number, &Verdict::Failed(error.clone()))?;
        Err(error)
    }

    /// The verdict, now that as many ranks have come as there are.
    fn complete(&self, number: u32) -> Result<Verdict> {
        let mut entries = self.entries(number)?;
        entries.sort_by_key(|entry| entry.peer.rank);
        let size = self.me.world_size;
        if entries.len() != size || entries.iter().enumerate().any(|(rank, entry)| entry.peer.rank != rank) {
            return Err(Error::Internal {
                message: format!("{size} ranks arrived, but not each of them: {entries:?}"),
            });
        }
        Ok(Verdict::Complete { token: random().map_err(threads)?, entries })
    }

    /// The error of a round whose time is over.
    fn missed(&self, number: u32) -> Result<Error> {
        let mut came: Vec<PeerInfo> = self.entries(number)?.into_iter().map(|entry| entry.peer).collect();
        came.sort_by_key(|peer| peer.rank);
        let missing: Vec<usize> =
            (0..self.me.world_size).filter(|rank| came.iter().all(|peer| peer.rank != *rank)).collect();
        let message = format!(
            "rank {} waited {:.1} s for all {} ranks to come",
            self.me.peer.rank,
            self.start.elapsed().as_secs_f64(),
            self.me.world_size
        );
        Ok(Error::Rendezvous { message, came, missing })
    }

    fn entries(&self, number: u32) -> Result<Vec<Entry>> {
        let keys = self.store.keys(&self.key(number, "rank/"))?;
        keys.iter().map(|key| decode(&self.store.get(key, Duration::ZERO)?)).collect()
    }

    /// Posts a verdict; the one that counts.
    fn decide(&self, number: u32, verdict: &Verdict) -> Result<Verdict> {
        match self.store.set_new(&self.key(number, "verdict"), &encode(verdict)?)? {
            None => Ok(verdict.clone()),
            Some(first) => decode(&first),
        }
    }

    fn key(&self, number: u32, name: &str) -> String {
        format!("{}/{number}/{name}", self.job)
    }
}

/// Connects to every peer for control; the streams by rank.
fn connect_all(
    control: &Control,
    key: &LinkKey,
    rank: usize,
    entries: &[Entry],
    deadline: Instant,
) -> Result<Vec<Option<TcpStream>>> {
    let mut streams = Vec::with_capacity(entries.len());
    for entry in &entries[..rank] {
        let purpose = Purpose::Control { rank: rank as u32 };
        let stream = dial((&entry.host, entry.port), key, entry.peer.rank, purpose, deadline).map_err(|cause| {
            unreached(&entry.peer, &format!("at {}: {cause}", address::join(&entry.host, entry.port)))
        })?;
        streams.push(Some(stream));
    }
    streams.push(None);
    for entry in &entries[rank + 1..] {
        let purpose = Purpose::Control { rank: entry.peer.rank as u32 };
        match control.links().claim(purpose, deadline, || Ok(()))? {
            Some(stream) => streams.push(Some(stream)),
            None => return Err(unreached(&entry.peer, "in time: it did not connect")),
        }
    }
    Ok(streams)
}

/// Connects to the listener of rank `peer` for `purpose`.
pub(crate) fn dial(
    to: (&str, u16),
    key: &LinkKey,
    peer: usize,
    purpose: Purpose,
    deadline: Instant,
) -> Result<TcpStream, String> {
    // Among many connections at a time the listener may drop one unheard; it hears the next.
    let insist_until = deadline.min(Instant::now() + HANDSHAKE_DEADLINE);
    let me = Introduction { key: &key.key, tag: key.tag, to: Role::Rank(peer as u32), purpose };
    loop {
        let socket = address::connect_once(to.0, to.1, deadline).map_err(|e| e.to_string())?;
        match introduce(&socket, &me, deadline) {
            Ok(()) => return Ok(socket.into()),
            Err(Refusal::NotOurs(e)) if e.kind() != ErrorKind::TimedOut && Instant::now() < insist_until => {
                std::thread::sleep(address::RETRY);
            }
            Err(refusal) => return Err(refusal.to_string()),
        }
    }
}

fn unreached(peer: &PeerInfo, how: &str) -> Error {
    Error::Rendezvous {
        message: format!(
            "{peer} came, but could not be reached {how}; it has probably ended, or a firewall is between"
        ),
        came: Vec::new(),
        missing: vec![peer.rank],
    }
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|e| Error::Internal { message: format!("could not encode for the store: {e}") })
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|e| Error::Rendezvous {
        message: format!("the store holds something that is not of this version of burn-ddp: {e}"),
        came: Vec::new(),
        missing: Vec::new(),
    })
}

fn threads(e: std::io::Error) -> Error {
    environment(format!("this process cannot have another thread or socket: {e}"))
}

fn environment(message: String) -> Error {
    Error::Environment { message }
}
