//! The client of a store.

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::Store;
use super::protocol::{MESSAGE_CAP, Request, Response};
use crate::auth::handshake::{HANDSHAKE_DEADLINE, Introduction, OTHER_SECRET, Purpose, Refusal, Role, by, introduce};
use crate::net::encrypted_messages::Wire;
use crate::net::interface::Interface;
use crate::net::name_lookup::NameLookup;
use crate::net::wait::deadline_in;
use crate::net::{bind_and_connect, unix_socket};
use crate::poison_free_locks::lock;
use crate::{Error, JobKey, Result};

/// Time that the server may take to answer, beyond the wait that a request asks for.
const ANSWER_DEADLINE: Duration = Duration::from_secs(30);

/// The client of a [`StoreServer`](crate::StoreServer).
///
/// Calls from several threads do not wait for each other: each uses a connection of its own.
///
/// ```
/// use burn_ddp_comm::{JobKey, Secret, Store, StoreClient, StoreServer};
/// use std::time::Duration;
///
/// let job = JobKey::new(&Secret::generate()?, "job 7", 0);
/// let server = StoreServer::bind("127.0.0.1:0", &job)?;
/// let store = StoreClient::connect(&server.local_addr().to_string(), &job, Duration::from_secs(10))?;
/// store.set("key", b"value")?;
/// assert_eq!(store.get("key", Duration::from_secs(1))?, b"value");
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
#[derive(Debug)]
pub struct StoreClient {
    place: Place,
    job: JobKey,
    /// Connections that no call uses at the moment.
    idle: Mutex<Vec<Wire>>,
    local_ip: IpAddr,
    /// Scope id of the link by which the store was reached, if its address is link-local; else 0.
    zone: u32,
    answer_within: Duration,
}

/// Address of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Tcp {
        host: String,
        port: u16,
        /// Interface from which to connect.
        via: Interface,
    },
    /// A unix socket of this machine, for processes of this user.
    Local { name: String },
}

impl Place {
    /// Host of a store that is reached over TCP; "localhost" for a local socket.
    pub(crate) fn host(&self) -> &str {
        match self {
            Self::Tcp { host, .. } => host,
            Self::Local { .. } => "localhost",
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, .. } => f.write_str(&bind_and_connect::join(host, *port)),
            Self::Local { name } => write!(f, "local socket {name:?}"),
        }
    }
}

/// Reason that an attempt to connect failed.
pub(crate) enum Unreached {
    /// No store of this protocol answers there, or none does yet.
    Absent(String),
    /// A store answered and refused this process.
    Refused(String),
}

impl StoreClient {
    /// Connects to the store of `job` at `address`, `host:port`; tries again until `timeout` while no store answers
    /// there.
    ///
    /// # Errors
    /// [`Error::Environment`] if no store answered in time, or the store is of another job, secret or protocol version.
    pub fn connect(address: &str, job: &JobKey, timeout: Duration) -> Result<StoreClient> {
        let (host, port) = bind_and_connect::split(address).ok_or_else(|| Error::Environment {
            message: format!("the store's address {address:?} is not of the form host:port"),
        })?;
        let place = Place::Tcp { host: host.to_owned(), port, via: Interface::default() };
        let deadline = deadline_in(timeout);
        let (mut failure, mut names) = (String::new(), NameLookup::new(host));
        loop {
            match Self::try_connect(&place, &mut names, job, deadline, HANDSHAKE_DEADLINE) {
                Ok(store) => return Ok(store),
                Err(Unreached::Refused(cause)) => {
                    return Err(Error::Environment {
                        message: format!(
                            "the store at {address} refused this process, of job {:?}: {cause}",
                            job.name()
                        ),
                    });
                }
                // An attempt cut short by the deadline says less than the one before.
                Err(Unreached::Absent(cause)) if failure.is_empty() || Instant::now() < deadline => failure = cause,
                Err(Unreached::Absent(_)) => {}
            }
            if Instant::now() + bind_and_connect::RETRY >= deadline {
                let waited = timeout.as_secs_f64();
                let message =
                    format!("could not reach the store at {address} within {waited} s; last attempt: {failure}");
                return Err(Error::Environment { message });
            }
            std::thread::sleep(bind_and_connect::RETRY);
        }
    }

    /// One attempt to connect, in which the listener gets `patience` for its greeting. `names` looks up the host.
    pub(crate) fn try_connect(
        place: &Place,
        names: &mut NameLookup,
        job: &JobKey,
        deadline: Instant,
        patience: Duration,
    ) -> Result<StoreClient, Unreached> {
        let wire = open(place, names, job, deadline, patience)?;
        let local = wire.socket().local_addr().map_err(|e| Unreached::Absent(e.to_string()))?;
        let local = local.as_socket().unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let zone = if let SocketAddr::V6(local) = local { local.scope_id() } else { 0 };
        let idle = Mutex::new(vec![wire]);
        let (place, job, local_ip) = (place.clone(), job.clone(), local.ip());
        Ok(StoreClient { place, job, idle, local_ip, zone, answer_within: ANSWER_DEADLINE })
    }

    /// Sets the time, beyond the wait that a call asks for, after which a server that does not answer counts as lost.
    /// 30 s by default.
    #[must_use]
    pub fn answer_within(mut self, time: Duration) -> StoreClient {
        self.answer_within = time;
        self
    }

    /// The address of the interface through which this machine reaches the store; loopback if the store is on it.
    pub fn local_ip(&self) -> IpAddr {
        self.local_ip
    }

    pub(crate) fn zone(&self) -> u32 {
        self.zone
    }

    /// Address of the store: `host:port`, or the name of a local socket.
    pub fn address(&self) -> String {
        self.place.to_string()
    }

    /// Leaves `entries` with the server, which sets those keys that are not set yet as soon as this client's connection
    /// ends, when the client is dropped or its process ends. Replaces the entries of an earlier call. Only for a client
    /// that one thread uses: with several threads it has several connections.
    ///
    /// # Errors
    /// As for [`Store::set`].
    pub(crate) fn last_will(&self, entries: Vec<(String, Vec<u8>)>) -> Result<()> {
        entries.iter().try_for_each(|(key, value)| check(key, value))?;
        let request = Request::LastWill { entries };
        let bytes = postcard::to_stdvec(&request).map_or(usize::MAX, |bytes| bytes.len());
        if bytes > MESSAGE_CAP {
            let message =
                format!("a last will of {bytes} bytes is longer than the {MESSAGE_CAP} that a message may have");
            return Err(Error::Store { message });
        }
        match self.ask(&request, Duration::ZERO)? {
            Response::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Sends a request and waits for its response, which may take the server `wait`.
    fn ask(&self, request: &Request, wait: Duration) -> Result<Response> {
        let idle = self.lock_idle().pop();
        let mut wire = match idle {
            Some(wire) => wire,
            None => self.reopen()?,
        };
        let deadline = deadline_in(wait.saturating_add(self.answer_within));
        let answer = wire.send(request, deadline).and_then(|()| wire.recv(deadline));
        match answer.map_err(|e| self.lost(&Refusal::NotOurs(e).to_string()))? {
            Response::Refused(message) => {
                self.lock_idle().push(wire);
                Err(Error::Store { message })
            }
            response => {
                self.lock_idle().push(wire);
                Ok(response)
            }
        }
    }

    /// Makes a further connection.
    fn reopen(&self) -> Result<Wire> {
        let mut names = NameLookup::new(self.place.host());
        let deadline = deadline_in(self.answer_within);
        open(&self.place, &mut names, &self.job, deadline, HANDSHAKE_DEADLINE).map_err(|unreached| match unreached {
            Unreached::Absent(cause) | Unreached::Refused(cause) => self.lost(&cause),
        })
    }

    fn lock_idle(&self) -> std::sync::MutexGuard<'_, Vec<Wire>> {
        lock(&self.idle)
    }

    fn lost(&self, cause: &str) -> Error {
        let message = format!(
            "lost the connection to the store at {}: {cause}; the process that hosts it (rank 0 or the launcher) has \
             probably ended",
            self.address()
        );
        Error::Store { message }
    }

    fn unexpected(&self, response: &Response) -> Error {
        Error::Internal {
            message: format!("the store at {} gave an answer of the wrong kind: {response:?}", self.address()),
        }
    }
}

/// Connects to the store of `job`.
pub(super) fn open(
    place: &Place,
    names: &mut NameLookup,
    job: &JobKey,
    deadline: Instant,
    patience: Duration,
) -> Result<Wire, Unreached> {
    let absent = |e: std::io::Error| Unreached::Absent(e.to_string());
    let socket = match place {
        Place::Tcp { port, via, .. } => names
            .addresses(*port)
            .and_then(|addresses| bind_and_connect::connect_any(&addresses, via, deadline))
            .map_err(absent)?,
        Place::Local { name } => unix_socket::connect(name).map_err(|e| match e.kind() {
            // A process of another user listens there: waiting does not help.
            ErrorKind::PermissionDenied => Unreached::Refused(e.to_string()),
            _ => absent(e),
        })?,
    };
    let me = Introduction { key: job.store(), tag: job.tag(), to: Role::Store, purpose: Purpose::Store };
    let (until, answer_by) = (Instant::now() + patience, Instant::now() + patience.max(HANDSHAKE_DEADLINE));
    let stream =
        introduce(socket, &me, until.min(deadline), by(answer_by.min(deadline))).map_err(|refusal| match refusal {
            Refusal::NotOurs(_) => Unreached::Absent(refusal.to_string()),
            Refusal::Misdirected(cause) => Unreached::Refused(cause),
            Refusal::Refused(cause) => Unreached::Refused(match job.secret_file() {
                Some(file) if cause.contains(OTHER_SECRET) => {
                    format!("{cause}; this process has the secret of {}", file.display())
                }
                _ => cause,
            }),
        })?;
    Wire::new(stream, MESSAGE_CAP).map_err(absent)
}

impl Store for StoreClient {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check(key, value)?;
        match self.ask(&Request::Set { key: key.into(), value: value.into() }, Duration::ZERO)? {
            Response::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check(key, &[])?;
        // Rounded up: the server must not give up before the caller's deadline.
        let wait_ms = timeout.as_micros().div_ceil(1000).try_into().unwrap_or(u64::MAX);
        match self.ask(&Request::Get { key: key.into(), wait_ms }, timeout)? {
            Response::Value(value) => Ok(value),
            Response::Absent => Err(Error::StoreTimeout { key: key.to_owned(), waited: timeout }),
            other => Err(self.unexpected(&other)),
        }
    }

    fn set_new(&self, key: &str, value: &[u8]) -> Result<Option<Vec<u8>>> {
        check(key, value)?;
        match self.ask(&Request::SetNew { key: key.into(), value: value.into() }, Duration::ZERO)? {
            Response::Absent => Ok(None),
            Response::Value(value) => Ok(Some(value)),
            other => Err(self.unexpected(&other)),
        }
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check(key, &[])?;
        match self.ask(&Request::Add { key: key.into(), delta }, Duration::ZERO)? {
            Response::Number(sum) => Ok(sum),
            other => Err(self.unexpected(&other)),
        }
    }

    fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        check(prefix, &[])?;
        match self.ask(&Request::Keys { prefix: prefix.into() }, Duration::ZERO)? {
            Response::Keys(keys) => Ok(keys),
            other => Err(self.unexpected(&other)),
        }
    }
}

/// Refuses a key or value that is too long before it is sent: the server would close the connection.
fn check(key: &str, value: &[u8]) -> Result<()> {
    super::key_value_table::check(key, value).map_err(|message| Error::Store { message })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreServer;
    use crate::store::VALUE_CAP;

    #[test]
    fn a_last_will_that_is_too_long_is_refused_and_the_store_stays_reachable() {
        let job = JobKey::trusting_network("job", 0);
        let server = StoreServer::bind("127.0.0.1:0", &job).unwrap();
        let store = StoreClient::connect(&server.local_addr().to_string(), &job, ANSWER_DEADLINE).unwrap();
        let long = || vec![0; VALUE_CAP / 2];
        let refused = store.last_will(vec![("a".into(), long()), ("b".into(), long()), ("c".into(), long())]);
        assert!(matches!(&refused, Err(Error::Store { message }) if message.contains("last will")), "{refused:?}");
        store.set("d", b"value").unwrap();
        store.last_will(vec![("a".into(), long()), ("b".into(), long()[1..].to_vec())]).unwrap();
    }
}
