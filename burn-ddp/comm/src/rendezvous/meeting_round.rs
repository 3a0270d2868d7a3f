//! One round of the rendezvous in the store: each rank posts its entry, and one verdict counts for all ranks.

use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::settings_check::{self, ComparedSettings};
use crate::auth::hmac_key::{KEY_BYTES, random};
use crate::membership::Routes;
use crate::net::descriptors::Room;
use crate::store::{Serving, Store, StoreClient};
use crate::topology::Machines;
use crate::{Error, JobKey, PeerInfo, Result};

/// Most rounds of one job in one store. A program that reaches it calls [`World::join`](crate::World::join) in an
/// endless loop.
const ROUNDS_CAP: u32 = 10_000;
/// Time by which the other ranks wait longer than the rank that hosts the store.
const AFTER_THE_HOST: Duration = Duration::from_secs(1);

/// A rank's entry in the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) peer: PeerInfo,
    pub(super) world_size: usize,
    /// Host name or address, and port, at which other ranks reach its listener.
    pub(super) host: String,
    pub(super) port: u16,
    /// Equal for ranks that can share memory; `None` on systems where that is not known.
    pub(super) memory: Option<String>,
    /// Equal for ranks of one machine.
    pub(super) machine: String,
    pub(super) config: ComparedSettings,
    pub(super) room: Room,
}

impl Entry {
    fn settings(&self) -> (&PeerInfo, &ComparedSettings) {
        (&self.peer, &self.config)
    }
}

/// Outcome of a round.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Verdict {
    /// All ranks came.
    Complete {
        /// Random bytes, from which and the job's key the key of this world's connections is derived.
        token: [u8; KEY_BYTES],
        entries: Vec<Entry>,
    },
    /// Not all ranks came, or their settings contradict each other.
    Failed(Error),
}

/// A round in which all ranks came.
pub(super) struct Met {
    number: u32,
    /// See [`Verdict::Complete`].
    pub(super) token: [u8; KEY_BYTES],
    /// All entries, by rank.
    pub(super) entries: Vec<Entry>,
}

/// A rank's part in a round.
pub(super) struct Round<'a> {
    pub(super) store: &'a StoreClient,
    pub(super) job: &'a JobKey,
    pub(super) me: &'a Entry,
    /// The store, if it lives in this process.
    pub(super) server: Option<&'a Serving>,
    /// True if a launcher watches the ranks, and reports how one ended.
    pub(super) is_watched: bool,
    pub(super) start: Instant,
    pub(super) deadline: Instant,
}

impl Round<'_> {
    /// Posts this rank's entry and waits for the verdict. If this rank's connection to the store ends before it has
    /// [joined](Self::joined), the store fails the ranks that are [still connecting](Self::check), and, where no
    /// launcher watches the ranks, those that wait for the verdict.
    pub(super) fn attend(&self) -> Result<Met> {
        let number = self.post()?;
        let mut last_will = vec![(self.key(number, "lost"), encode(&self.lost("while the ranks connected"))?)];
        if !self.is_watched {
            let verdict = Verdict::Failed(self.lost("while the ranks waited for all to come"));
            last_will.push((self.key(number, "verdict"), encode(&verdict)?));
        }
        self.store.last_will(last_will)?;
        if self.store.add(&self.key(number, "arrived"), 1)? == self.me.world_size as i64 {
            // If entries cannot be read, that error is the verdict, since no other verdict would come.
            let verdict = self.complete(number).unwrap_or_else(Verdict::Failed);
            self.decide(number, &verdict)?;
        }
        // A rank that hosts the store gives up first: then the store may be gone before a later verdict arrives.
        let late = if self.server.is_some() { Duration::ZERO } else { AFTER_THE_HOST };
        let left = (self.deadline + late).saturating_duration_since(Instant::now());
        let verdict = match self.store.get(&self.key(number, "verdict"), left) {
            Ok(bytes) => decode(&bytes)?,
            // The last rank may have come at the last moment: the first verdict counts.
            Err(Error::StoreTimeout { .. }) => self.decide(number, &Verdict::Failed(self.missed(number)?))?,
            Err(e) => return Err(e),
        };
        match verdict {
            Verdict::Complete { token, entries } => Ok(Met { number, token, entries }),
            Verdict::Failed(error) => Err(error),
        }
    }

    /// Error that the other ranks return if this rank ends.
    fn lost(&self, when: &str) -> Error {
        let message = format!("{} ended, or lost its connection to the store, {when}", self.me.peer);
        Error::Rendezvous { message, came: Vec::new(), missing: vec![self.me.peer.rank] }
    }

    /// Checks that no rank has failed since all came.
    ///
    /// # Errors
    /// The first failure. `Ok` if the store cannot be asked, since its host may have joined and left.
    pub(super) fn check(&self, met: &Met) -> Result<()> {
        match self.store.get(&self.key(met.number, "lost"), Duration::ZERO) {
            Ok(failure) => Err(decode(&failure)?),
            Err(_) => Ok(()),
        }
    }

    /// Posts that this rank cannot connect. Returns the first failure that a rank posted, which all ranks return.
    pub(super) fn cannot_connect(&self, met: &Met, error: Error) -> Error {
        let for_others = match &error {
            Error::Rendezvous { .. } => error.clone(),
            own => {
                let missing = vec![self.me.peer.rank];
                Error::Rendezvous { message: own.to_string(), came: Vec::new(), missing }
            }
        };
        let first = encode(&for_others).and_then(|mine| self.store.set_new(&self.key(met.number, "lost"), &mine));
        match first {
            Ok(Some(first)) => decode(&first).unwrap_or(error),
            Ok(None) | Err(_) => error,
        }
    }

    /// Notes that this rank has connected: from now on the store does not report its end.
    pub(super) fn joined(&self) {
        // The host of the store may have joined and left.
        if let Err(error) = self.store.last_will(Vec::new()) {
            tracing::debug!(%error, "the store ended before this rank had joined");
        }
    }

    /// Posts, as the verdict for all ranks, that this rank cannot join because of `why`.
    ///
    /// # Errors
    /// Always: the verdict that counts.
    pub(super) fn give_up(&self, why: &str) -> Result<()> {
        let number = self.post()?;
        let error = cannot_join(&self.me.peer, why);
        match self.decide(number, &Verdict::Failed(error.clone()))? {
            Verdict::Failed(first) => Err(first),
            Verdict::Complete { .. } => Err(error),
        }
    }

    /// Posts this rank's entry in the first round that has none; returns the round's number.
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
                    "rank {} was started twice: by {} and by process {} on {}; each process needs a rank of its own, \
                     and each job a port or a BURN_DDP_JOB_ID of its own",
                    self.me.peer.rank, there.peer, self.me.peer.pid, self.me.peer.host
                );
                let error = Error::Rendezvous { message, came: Vec::new(), missing: Vec::new() };
                self.decide(number, &Verdict::Failed(error.clone()))?;
                return Err(error);
            }
        }
        Err(Error::environment(format!("this process has joined {ROUNDS_CAP} times")))
    }

    /// Compares the world size with that of the first rank that came.
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

    /// The verdict, now that all ranks have come.
    fn complete(&self, number: u32) -> Result<Verdict> {
        let mut entries = self.entries(number)?;
        entries.sort_by_key(|entry| entry.peer.rank);
        let size = self.me.world_size;
        if entries.len() != size || entries.iter().enumerate().any(|(rank, entry)| entry.peer.rank != rank) {
            return Err(Error::Internal {
                message: format!("{size} ranks have come, but not one of each number: {entries:?}"),
            });
        }
        if let Some(message) = settings_check::difference(entries.iter().map(Entry::settings)) {
            return Ok(Verdict::Failed(Error::Rendezvous { message, came: Vec::new(), missing: Vec::new() }));
        }
        if let Some((one, other)) = settings_check::different_programs(entries.iter().map(Entry::settings)) {
            tracing::warn!("{one} and {other} run different programs");
        }
        if let Some((peer, why)) = without_room(&entries) {
            return Ok(Verdict::Failed(cannot_join(peer, &why)));
        }
        for entry in &mut entries {
            entry.config = std::mem::take(&mut entry.config).compared();
        }
        Ok(Verdict::Complete { token: random().map_err(threads)?, entries })
    }

    /// Error of a round that missed its deadline.
    fn missed(&self, number: u32) -> Result<Error> {
        let mut came: Vec<PeerInfo> = self.entries(number)?.into_iter().map(|entry| entry.peer).collect();
        came.sort_by_key(|peer| peer.rank);
        let missing: Vec<usize> =
            (0..self.me.world_size).filter(|rank| came.iter().all(|peer| peer.rank != *rank)).collect();
        let refused = self.server.and_then(Serving::refused).map(|refused| format!("; its store refused {refused}"));
        let message = format!(
            "rank {} waited {:.1} s for all {} ranks to come{}",
            self.me.peer.rank,
            self.start.elapsed().as_secs_f64(),
            self.me.world_size,
            refused.unwrap_or_default()
        );
        Ok(Error::Rendezvous { message, came, missing })
    }

    fn entries(&self, number: u32) -> Result<Vec<Entry>> {
        entries(self.store, self.job, number)
    }

    /// Posts `verdict`. Returns the verdict that counts, the first one.
    fn decide(&self, number: u32, verdict: &Verdict) -> Result<Verdict> {
        decide(self.store, self.job, number, verdict)
    }

    fn key(&self, number: u32, name: &str) -> String {
        key(self.job, number, name)
    }
}

/// Fails the joins of the ranks of `job` that are joining or still come: they would wait in vain, since the ranks
/// `missing` ended before they joined.
///
/// For a launcher, which notices that a process ended, and connects to the store as a rank does. Ranks that have joined
/// already notice nothing. After several calls, the ranks return the `cause` of the first.
///
/// ```
/// use burn_ddp_comm::{JobKey, LaunchEnv, Meeting, WorldOptions, Secret, StoreClient, StoreServer, World, fail_join};
/// use std::time::Duration;
///
/// let job = JobKey::trusting_network("example", 0);
/// let server = StoreServer::bind("127.0.0.1:0", &job)?;
/// let address = server.local_addr();
/// let store = StoreClient::connect(&address.to_string(), &job, Duration::from_secs(10))?;
/// fail_join(&store, &job, &[1], "rank 1 ended before it joined: exit code 3")?;
///
/// let meeting = Meeting::Launcher { host: address.ip().to_string(), port: address.port() };
/// let env = LaunchEnv { trust_network: true, ..LaunchEnv::new(0, 2, meeting, "example") };
/// let error = World::join(&env, WorldOptions::default()).unwrap_err().to_string();
/// assert!(error.contains("exit code 3") && error.contains("missing: rank 1"), "{error}");
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
///
/// # Errors
/// The errors of `store`.
pub fn fail_join(store: &dyn Store, job: &JobKey, missing: &[usize], cause: &str) -> Result<()> {
    for number in 0..ROUNDS_CAP {
        let came = entries(store, job, number)?.into_iter().map(|entry| entry.peer).collect();
        let error = Error::Rendezvous { message: cause.to_owned(), came, missing: missing.to_vec() };
        // A round that is complete is over: ranks that join now do so in the next one.
        if let Verdict::Failed(_) = decide(store, job, number, &Verdict::Failed(error))? {
            return Ok(());
        }
    }
    Err(Error::environment(format!("job {:?} has joined {ROUNDS_CAP} times", job.name())))
}

/// The first rank that has too few descriptors for its control connections, and the error's text.
fn without_room(entries: &[Entry]) -> Option<(&PeerInfo, String)> {
    let size = entries.len();
    let machines = Machines::new(&entries.iter().map(|entry| &entry.machine).collect::<Vec<_>>());
    entries.iter().find_map(|entry| {
        // Most ranks have room for connections to all others, and need no routes.
        entry.room.check(size - 1, size).err()?;
        let routes = Routes::new(entry.peer.rank, machines.clone());
        let neighbours = (0..size).filter(|other| routes.is_near(*other)).count();
        Some((&entry.peer, entry.room.check(neighbours, size).err()?))
    })
}

fn cannot_join(peer: &PeerInfo, why: &str) -> Error {
    let message = format!("{peer} cannot join: {why}");
    Error::Rendezvous { message, came: Vec::new(), missing: vec![peer.rank] }
}

/// Entries of the ranks that have come so far.
fn entries(store: &dyn Store, job: &JobKey, number: u32) -> Result<Vec<Entry>> {
    let keys = store.keys(&key(job, number, "rank/"))?;
    keys.iter().map(|key| decode(&store.get(key, Duration::ZERO)?)).collect()
}

/// Posts `verdict`. Returns the verdict that counts, the first one.
fn decide(store: &dyn Store, job: &JobKey, number: u32, verdict: &Verdict) -> Result<Verdict> {
    match store.set_new(&key(job, number, "verdict"), &encode(verdict)?)? {
        None => Ok(verdict.clone()),
        Some(first) => decode(&first),
    }
}

/// Error of a system that refuses a thread or socket.
pub(super) fn threads(e: std::io::Error) -> Error {
    Error::environment(format!("this process cannot have another thread or socket: {e}"))
}

fn key(job: &JobKey, number: u32, name: &str) -> String {
    format!("{}/{number}/{name}", job.name())
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

/// Parses arbitrary bytes from the store as ranks do.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Ok(entry) = decode::<Entry>(bytes) {
        assert!(encode(&entry).is_ok());
    }
    if let Ok(Verdict::Complete { entries, .. }) = decode(bytes) {
        let ranks = || entries.iter().map(Entry::settings);
        let _ = (settings_check::difference(ranks()), settings_check::different_programs(ranks()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorldOptions;
    use crate::frame::PROTOCOL_VERSION;

    fn entry(rank: usize, machine: usize, room: Room) -> Entry {
        Entry {
            peer: PeerInfo { host: "h".to_owned(), pid: 7, ..PeerInfo::here(rank, rank, 0) },
            world_size: 2,
            host: "h".to_owned(),
            port: 9,
            memory: None,
            machine: machine.to_string(),
            config: ComparedSettings::of(&WorldOptions::default()).compared(),
            room,
        }
    }

    #[test]
    fn the_descriptors_of_a_place_among_machines_are_counted() {
        // Machines of the ranks, and the most connections of one, with the rank that has them.
        for (machines, most, of) in [
            (&[0, 0, 0, 0][..], 3, 0),
            (&[0, 1, 2, 3], 3, 0),
            (&[0, 0, 1, 1, 2, 2], 3, 0),
            (&[0, 0, 1, 2, 3, 4], 5, 0),
            (&[0, 1, 1, 1, 1, 1], 5, 0),
            (&[1, 0, 0, 0, 0, 0, 1], 5, 1),
            (&[0, 0, 0, 1, 1], 3, 0),
        ] {
            let with = |limit| -> Vec<Entry> {
                let entry = |(rank, machine): (usize, &usize)| entry(rank, *machine, Room::limited(limit, 0));
                machines.iter().enumerate().map(entry).collect()
            };
            let fixed = 8;
            assert!(without_room(&with(fixed + most)).is_none(), "{machines:?}");
            let entries = with(fixed + most - 1);
            let (peer, why) = without_room(&entries).unwrap();
            assert_eq!(peer.rank, of, "{machines:?}");
            assert!(why.contains(&format!("needs at least {} in a world of {} ranks", fixed + most, machines.len())));
        }
    }

    /// A change of these bytes needs another version.
    #[test]
    fn entries_have_the_layout_of_this_version() {
        let mut entry = entry(1, 0, Room::limited(30, 12));
        entry.config = ComparedSettings::default();
        let bytes = encode(&entry).unwrap();
        // The cores of the machine are in the middle.
        let (begin, end) = (&bytes[..6], &bytes[bytes.len() - 12..]);
        let expected = (&[1, 1, b'h', 7, 1, 0][..], &[2, 1, b'h', 9, 0, 1, b'0', 0, 0, 1, 30, 12][..]);
        assert_eq!((PROTOCOL_VERSION, (begin, end)), (7, expected));
    }
}
