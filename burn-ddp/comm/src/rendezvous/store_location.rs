//! Place of a job's store: rank 0 hosts the store there, unless the launcher does, and all ranks connect to it.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::auth::handshake::HANDSHAKE_DEADLINE;
use crate::env::{LaunchEnv, Meeting, PORTS_ABOVE};
use crate::net::interface::Interface;
use crate::net::name_lookup::NameLookup;
use crate::net::{bind_and_connect, unix_socket};
use crate::store::{Place, Serving, StoreClient, Unreached};
use crate::{Error, JobKey, Result, Secret};

/// Advice to a rank that reached the store of another job.
const OTHER_JOB: &str = "; give each job a port (MASTER_PORT) or a BURN_DDP_JOB_ID of its own; if they are one job \
                         whose ranks run programs of different names, set the same BURN_DDP_JOB_ID on all of them";

/// Meeting point and key of a job, as its ranks agreed.
pub(super) struct Agreed {
    pub(super) meeting: Meeting,
    pub(super) job: JobKey,
    /// The store, if this rank hosts it and it is there already.
    pub(super) server: Option<Serving>,
}

/// Meeting point of the ranks of `env`.
///
/// Ranks that all run on this machine need no port. Without a secret any user could connect to a port, so the ranks
/// meet at a local socket, whose name contains the number of the port.
pub(super) fn meeting(env: &LaunchEnv) -> Meeting {
    let is_secret = env.secret_file.is_some() || env.trust_network;
    let is_here = env.local_world_size == env.world_size && bind_and_connect::is_loopback(env.meeting.host());
    match &env.meeting {
        Meeting::Rank0 { port, .. } | Meeting::Rank0Above { port, .. } if is_here && !is_secret => {
            Meeting::Local { name: format!("{}, port {port}", env.job_id) }
        }
        other => other.clone(),
    }
}

/// Key of the job whose ranks meet at `meeting`.
pub(super) fn job_key(env: &LaunchEnv, meeting: &Meeting) -> Result<JobKey> {
    // A rank may try many ports, also those of another job with the same default id: the port in the key tells them
    // apart.
    let id = match meeting {
        Meeting::Rank0Above { port, .. } => format!("{}, above port {port}", env.job_id),
        _ => env.job_id.clone(),
    };
    let trusting = JobKey::trusting_network(&id, env.restart_count);
    match &env.secret_file {
        Some(path) => Ok(JobKey::new(&Secret::read(path)?, &id, env.restart_count)),
        None if env.trust_network => Ok(trusting),
        // Other users cannot reach the local socket, through which the ranks get a random key for their connections.
        None if matches!(meeting, Meeting::Local { .. }) => Ok(trusting),
        None => Err(Error::environment(format!(
            "the ranks would meet at {meeting} without a secret, so that any stranger could join; run `burnrun \
             secret FILE`, copy FILE to each machine and set BURN_DDP_SECRET_FILE=FILE there, or set \
             BURN_DDP_TRUST_NETWORK=1 if nobody else can reach these machines"
        ))),
    }
}

/// Address of this machine on which this rank listens if no interface was chosen: the address from which it reached the
/// store. A rank that hosts the store on all addresses reached it by loopback, and takes the address from which it
/// would reach the master.
pub(super) fn local_ip(env: &LaunchEnv, meeting: &Meeting, store: &StoreClient) -> Result<IpAddr> {
    let is_everywhere =
        env.bind.as_deref().and_then(|bind| bind.parse().ok()).is_some_and(|ip: IpAddr| ip.is_unspecified());
    let hosts = matches!(meeting, Meeting::Rank0 { .. } | Meeting::Rank0Above { .. }) && env.rank == 0;
    if !(hosts && is_everywhere) {
        return Ok(store.local_ip());
    }
    bind_and_connect::from_where(meeting.host(), meeting.port()).map_err(|e| {
        Error::environment(format!(
            "cannot find the address at which other ranks reach this one: {e}; set BURN_DDP_INTERFACE"
        ))
    })
}

/// Hosts the store, if this is rank 0 and the launcher does not host it, and connects to the store.
pub(super) fn meet(
    env: &LaunchEnv,
    meeting: &Meeting,
    job: &JobKey,
    via: &Interface,
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
            return Err(Error::Internal { message: "the ranks have agreed on no meeting point".into() });
        }
        Meeting::Launcher { host, port } => {
            let place = Place::Tcp { host: host.clone(), port: *port, via: via.clone() };
            return Ok((None, find_store(&[place], env, job, start, deadline)?));
        }
        Meeting::Rank0 { host, port } => (host, port, false),
        Meeting::Rank0Above { host, port } => (host, port, true),
    };
    let mut ports: Vec<u16> =
        if above { (1..=PORTS_ABOVE).filter_map(|above| port.checked_add(above)).collect() } else { vec![*port] };
    let mut server = None;
    let mut reached_at = host.as_str();
    if hosts {
        let (serving, port) = host_store(env.bind.as_deref().unwrap_or(host), &ports, env, job)?;
        server = Some(serving);
        ports = vec![port];
        // The master's address may lead to this process only from other machines.
        reached_at = match env.bind.as_deref() {
            Some("0.0.0.0") => "127.0.0.1",
            Some("::") => "::1",
            Some(bind) => bind,
            None => host,
        };
    }
    let places: Vec<Place> =
        ports.into_iter().map(|port| Place::Tcp { host: reached_at.to_owned(), port, via: via.clone() }).collect();
    Ok((server, find_store(&places, env, job, start, deadline)?))
}

/// Hosts the store on a local socket, for processes of this user on this machine only.
fn host_local(name: &str, job: &JobKey) -> Result<Serving> {
    // The process that has the name may be just ending.
    let give_up = Instant::now() + Duration::from_secs(1);
    loop {
        match unix_socket::bind(name).and_then(|listener| Serving::start(vec![listener], job)) {
            Ok(serving) => return Ok(serving),
            Err(e) if e.kind() == ErrorKind::AddrInUse && Instant::now() < give_up => {
                std::thread::sleep(bind_and_connect::RETRY)
            }
            Err(e) if e.kind() == ErrorKind::AddrInUse => {
                return Err(Error::environment(format!(
                    "another process serves the local socket {name:?} already: is this job started twice, or does \
                     rank 0 of an earlier one still run?"
                )));
            }
            Err(e) => {
                return Err(Error::environment(format!("rank 0 cannot host the store at local socket {name:?}: {e}")));
            }
        }
    }
}

/// Hosts the store on the first free one of `ports`.
fn host_store(host: &str, ports: &[u16], env: &LaunchEnv, job: &JobKey) -> Result<(Serving, u16)> {
    let far = env.local_world_size < env.world_size;
    let mut addresses = bind_and_connect::resolve(host, 0).into_iter().flatten().peekable();
    if far && env.bind.is_none() && addresses.peek().is_some() && addresses.all(|address| address.ip().is_loopback()) {
        return Err(Error::environment(format!(
            "{host} means loopback on rank 0's machine, which ranks on other machines cannot reach; give an address \
             instead of the name"
        )));
    }
    let mut failure = std::io::Error::other("there is no such port");
    for port in ports {
        // With one port, waits a moment for the process that has it to end; with many, tries the next.
        let bound = if ports.len() == 1 {
            bind_and_connect::bind(host, *port)
        } else {
            bind_and_connect::bind_once(host, *port)
        };
        match bound.and_then(|listeners| Serving::start(listeners, job)) {
            Ok(server) => return Ok((server, *port)),
            Err(e) => failure = e,
        }
    }
    let place = match ports {
        [port] => bind_and_connect::join(host, *port),
        _ => format!("{host}, ports {}-{}", ports.first().unwrap_or(&0), ports.last().unwrap_or(&0)),
    };
    let advice = match failure.kind() {
        ErrorKind::AddrInUse => {
            "; another job, or what is left of an earlier one, listens there: end it, or choose another port for \
             MASTER_PORT (or BURN_DDP_MASTER)"
        }
        ErrorKind::AddrNotAvailable => {
            "; that is no address of this machine: rank 0 must run on the master, or BURN_DDP_BIND name an address of \
             its machine to which the master's leads"
        }
        ErrorKind::PermissionDenied => {
            "; ports below 1024 are reserved: choose another for MASTER_PORT (or BURN_DDP_MASTER)"
        }
        _ => "",
    };
    Err(Error::environment(format!("rank 0 cannot host the store at {place}: {failure}{advice}")))
}

/// Connects to this job's store at one of `places`, all on one host. Tries them again and again until the deadline.
fn find_store(
    places: &[Place],
    env: &LaunchEnv,
    job: &JobKey,
    start: Instant,
    deadline: Instant,
) -> Result<StoreClient> {
    // With several ports, a silent program on one of them must not keep us from the next for long.
    let mut patience = if places.len() == 1 { HANDSHAKE_DEADLINE } else { HANDSHAKE_DEADLINE / 10 };
    let (mut failure, mut refused) = (String::new(), false);
    let mut names = NameLookup::new(places.first().map_or("", Place::host));
    loop {
        for place in places {
            match StoreClient::try_connect(place, &mut names, job, deadline, patience) {
                Ok(store) => return Ok(store),
                Err(Unreached::Refused(cause)) if places.len() == 1 => {
                    return Err(Error::environment(format!(
                        "the store at {place} refused rank {} of job {:?}: {cause}{}",
                        env.rank,
                        job.name(),
                        if cause.contains("of another job") { OTHER_JOB } else { "" }
                    )));
                }
                // The store at one of many ports may be another job's. For the error's text, a refusal says more than a
                // port without a store, and a refusal because of the protocol version says most.
                Err(Unreached::Refused(cause)) if !failure.contains("protocol version") => {
                    (failure, refused) = (format!("{place}: {cause}"), true);
                }
                Err(Unreached::Refused(_)) => {}
                Err(Unreached::Absent(cause)) => {
                    // An attempt cut short by the deadline says less than the one before.
                    if !refused && (failure.is_empty() || Instant::now() < deadline) {
                        failure = format!("{place}: {cause}");
                    }
                }
            }
        }
        if Instant::now() + bind_and_connect::RETRY >= deadline {
            let who = if matches!(env.meeting, Meeting::Launcher { .. }) { "the launcher" } else { "rank 0" };
            let port = if matches!(env.meeting, Meeting::Local { .. }) { "" } else { ", and is the port open" };
            let message = format!(
                "rank {} could not reach the master at {} within {:.1} s ({failure}); is {who} running \
                 there{port}?",
                env.rank,
                env.meeting,
                start.elapsed().as_secs_f64()
            );
            return Err(Error::environment(message));
        }
        patience = HANDSHAKE_DEADLINE.min(2 * patience);
        std::thread::sleep(bind_and_connect::RETRY);
    }
}
