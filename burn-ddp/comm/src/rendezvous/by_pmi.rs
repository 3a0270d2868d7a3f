//! Meeting point and secret of ranks that MPICH's mpirun started, exchanged through its process manager.

use std::net::TcpListener;
use std::sync::Mutex;
use std::time::Instant;

use super::store_location::{Agreed, job_key};
use crate::auth::sealed_secret::{self, Awaiting};
use crate::env::{LaunchEnv, Meeting};
use crate::net::bind_and_connect;
use crate::pmi::Pmi;
use crate::poison_free_locks::lock;
use crate::store::Serving;
use crate::{Error, JobKey, Result, Secret};

/// Key under which rank 0 puts `host:port` of its store, after the prefix [`MADE`] if rank 0 made the secret.
const PLACE: &str = "burn-ddp";
const MADE: &str = "made@";

/// Meeting point on which the ranks of this process's job agreed. There is one per process, as there is one session
/// with the process manager: a second world of this process meets at the same place.
static SESSION: Mutex<Option<Session>> = Mutex::new(None);

#[derive(Clone)]
struct Session {
    job_id: String,
    /// Secret, host and port of rank 0's store; `None` on one machine, where the name of the job is enough.
    place: Option<(Secret, String, u16)>,
}

pub(super) fn agree(env: &LaunchEnv, fd: i32, host: &str, deadline: Instant) -> Result<Agreed> {
    let mut known = lock(&SESSION);
    let mut server = None;
    let session = match &*known {
        Some(session) => session.clone(),
        None => {
            let mut pmi = Pmi::begin(fd, deadline)?;
            let job_id = format!("{}, {}", env.job_id, pmi.job());
            let on_one_machine = env.local_world_size == env.world_size;
            let place = if on_one_machine { None } else { Some(exchange(&mut pmi, env, &job_id, host, &mut server)?) };
            pmi.end()?;
            known.insert(Session { job_id, place }).clone()
        }
    };
    let Session { job_id, place } = session;
    let Some((secret, host, port)) = place else {
        let env = LaunchEnv { job_id, ..env.clone() };
        let meeting = Meeting::Local { name: env.job_id.clone() };
        return Ok(Agreed { job: job_key(&env, &meeting)?, meeting, server });
    };
    let job = JobKey::new(&secret, &job_id, env.restart_count);
    // For the first world, rank 0 hosts the store already; for later ones it is yet to host it.
    let meeting = match server {
        Some(_) => Meeting::Launcher { host, port },
        None => Meeting::Rank0 { host, port },
    };
    Ok(Agreed { meeting, job, server })
}

/// Rank 0 hosts the store on a free port of `host` and publishes the address. If the secret is in no file, rank 0 makes
/// one and sends it to each rank, sealed, since all that is published can be read in mpirun's log.
fn exchange(
    pmi: &mut Pmi,
    env: &LaunchEnv,
    job_id: &str,
    host: &str,
    server: &mut Option<Serving>,
) -> Result<(Secret, String, u16)> {
    let in_file = env.secret_file.as_deref().map(Secret::read).transpose()?;
    if env.rank > 0 {
        let (awaiting, request) = Awaiting::new(job_id)?;
        pmi.put(&request_key(env.rank), &request)?;
        pmi.barrier()?;
        pmi.barrier()?;
        let said = pmi.get(PLACE)?;
        let (secret, place) = match said.strip_prefix(MADE) {
            Some(place) => (awaiting.open(&pmi.get(&answer_key(env.rank))?), place),
            None => (in_file, said.as_str()),
        };
        return match (secret, bind_and_connect::split(place)) {
            (Some(secret), Some((host, port))) => Ok((secret, host.to_owned(), port)),
            _ => Err(no_common_secret()),
        };
    }
    let secret = in_file.clone().map_or_else(Secret::generate, Ok)?;
    let (serving, port) = host_store(host, &JobKey::new(&secret, job_id, env.restart_count))?;
    *server = Some(serving);
    pmi.barrier()?;
    if in_file.is_none() {
        for rank in 1..env.world_size {
            let request = pmi.get(&request_key(rank))?;
            let answer = sealed_secret::answer(job_id, &request, &secret)?.ok_or_else(no_common_secret)?;
            pmi.put(&answer_key(rank), &answer)?;
        }
    }
    let made = if in_file.is_some() { "" } else { MADE };
    pmi.put(PLACE, &format!("{made}{}", bind_and_connect::join(host, port)))?;
    pmi.barrier()?;
    Ok((secret, host.to_owned(), port))
}

fn request_key(rank: usize) -> String {
    format!("burn-ddp-rank-{rank}")
}

fn answer_key(rank: usize) -> String {
    format!("burn-ddp-for-{rank}")
}

fn no_common_secret() -> Error {
    Error::environment(
        "rank 0 and another rank found no secret in common: set BURN_DDP_SECRET_FILE for all ranks or for none, and \
         build all with the same burn-ddp",
    )
}

fn host_store(host: &str, job: &JobKey) -> Result<(Serving, u16)> {
    let hosted = bind_and_connect::bind(host, 0).and_then(|listeners| {
        let at = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
        if at.iter().all(|at| at.ip().is_loopback()) {
            return Err(std::io::Error::other("that means loopback here, which ranks on other machines cannot reach"));
        }
        Ok((Serving::start(listeners, job)?, at[0].port()))
    });
    hosted.map_err(|e| {
        Error::environment(format!(
            "rank 0 cannot host the store on {host}, as mpirun calls its machine: {e}; name another address of it by \
             BURN_DDP_MASTER=host:port"
        ))
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::pmi::fake::Hydra;

    #[test]
    fn the_secret_reaches_all_ranks_and_not_the_log() {
        const RANKS: usize = 3;
        let hydra = Hydra::new(RANKS);
        let agreed: Vec<_> = thread::scope(|s| {
            let ranks: Vec<_> = (0..RANKS)
                .map(|rank| {
                    let (mine, theirs) = UnixStream::pair().unwrap();
                    let hydra = &hydra;
                    s.spawn(move || hydra.serve(theirs));
                    s.spawn(move || {
                        let mut pmi = Pmi::begin(mine.as_raw_fd(), Instant::now() + Duration::from_secs(60)).unwrap();
                        // Only loopback is sure to be there, where no store for several machines may be hosted.
                        let meeting = Meeting::Pmi { fd: mine.as_raw_fd(), host: "0.0.0.0".into() };
                        let env = LaunchEnv::new(rank, RANKS, meeting, "job");
                        let mut server = None;
                        let (secret, host, port) = exchange(&mut pmi, &env, "job", "0.0.0.0", &mut server).unwrap();
                        pmi.end().unwrap();
                        (secret.digits(), host, port, server.is_some())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let (secret, host, port, _) = &agreed[0];
        for (rank, (own, at, number, hosts)) in agreed.iter().enumerate() {
            assert_eq!((own, at, number, *hosts), (secret, host, port, rank == 0));
        }
        let log = hydra.log();
        assert!(log.contains(&format!("{MADE}{host}:{port}")) && !log.contains(secret), "{log}");
    }
}
