//! What a rank knows about the others: who is there, who left, and the first thing that went wrong.
//!
//! Every wait of a collective also waits for this: whatever ends the world wakes it and is returned by it. Ranks in one
//! process share one [`Health`] state; between processes the control connections carry [`ControlMessage`]s from one
//! rank's health to the others'.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::call::{Call, CallInfo};
use crate::history::{Heartbeat, History};
use crate::liveness::Liveness;
use crate::peer::PeerInfo;
use crate::post_mortem::{self, Event};
use crate::track::Tracks;
use crate::{Error, LaunchEnv, Options, Result};

mod watch;

/// What ranks tell each other besides data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ControlMessage {
    /// Something went wrong: this ends the world.
    Fail {
        /// The root cause.
        cause: Error,
    },
    /// The sender lives, and this is what it does.
    Heartbeat(Heartbeat),
    /// The sender leaves in peace.
    Goodbye,
    /// The sender stopped on a track; see [`World::stop`](crate::World::stop).
    Stop {
        /// Which track.
        track: u64,
        /// Where it stopped.
        position: u64,
        /// What the sender calls it.
        what: String,
    },
}

/// The way to the healths of the other ranks.
pub trait Outbox: Send + Sync {
    /// Sends `message` to every other rank that can be reached, without blocking. Called from any thread, never with a
    /// lock of [`Health`] held. Messages of one rank arrive in the order they were sent.
    fn send_all(&self, message: &ControlMessage);
}

/// Something that waits and wants to look at the health again when it changes.
pub trait Wake: Send + Sync {
    /// Called after each change, from any thread, never with a lock of [`Health`] held. Must not block.
    fn wake(&self);
}

/// One rank's view of its world.
pub struct Health {
    rank: usize,
    shared: Arc<Shared>,
    /// The first collective on this rank that returned the cause; all later ones repeat it.
    noticed_by: OnceLock<Box<CallInfo>>,
    /// Done once, by the first who knows that the world has ended; others wait for it, so that no rank ends before its report is written.
    reported: OnceLock<()>,
}

const NO_STEP: u64 = u64::MAX;

/// Common to all ranks of one process.
struct Shared {
    peers: Vec<PeerInfo>,
    options: Options,
    /// Whether all ranks live in this process.
    local: bool,
    /// What each rank of this process does; of others nothing is written here.
    doing: Vec<Doing>,
    /// What is heard of the ranks in other processes. Written by the monitor.
    liveness: Mutex<Liveness>,
    /// Whether there is a cause. Set with it, read by every call.
    ended: AtomicBool,
    /// Who said goodbye. Written by ranks and control threads, read by every wait.
    left: Box<[AtomicBool]>,
    /// Written by ranks and control threads; never locked while calling out.
    state: Mutex<State>,
    /// Who waits. Transports add themselves when they are made; the dead are dropped at the next addition.
    wakers: Mutex<Vec<Weak<dyn Wake>>>,
    /// Set once, by the control connections; ranks in one process need none.
    outbox: OnceLock<Weak<dyn Outbox>>,
    /// Where the launcher reads what happens. Set once, before the first collective.
    launch: OnceLock<LaunchEnv>,
}

/// What one rank does.
struct Doing {
    /// The training step, [`NO_STEP`] if the program does not say. Written by the rank, read when it calls.
    step: AtomicU64,
    history: History,
}

struct State {
    /// The first thing that went wrong. Set once, stays.
    cause: Option<Error>,
    tracks: Tracks,
}

impl Health {
    /// The health of `rank`, the only one in this process.
    pub fn new(rank: usize, peers: Vec<PeerInfo>, options: Options) -> Arc<Health> {
        let liveness = Liveness::new(rank, peers.len(), &options, Instant::now());
        Arc::new(Health::view(rank, Shared::new(peers, options, liveness, false)))
    }

    /// The healths of all ranks of a world that lives in this process.
    pub fn shared(peers: Vec<PeerInfo>, options: Options) -> Vec<Arc<Health>> {
        let world_size = peers.len();
        // Nobody is listened to.
        let liveness = Liveness::new(0, 0, &options, Instant::now());
        let shared = Shared::new(peers, options, liveness, true);
        (0..world_size).map(|rank| Arc::new(Health::view(rank, shared.clone()))).collect()
    }

    fn view(rank: usize, shared: Arc<Shared>) -> Health {
        Health { rank, shared, noticed_by: OnceLock::new(), reported: OnceLock::new() }
    }

    /// The rank whose view this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// See [`World::set_step`](crate::World::set_step).
    pub(crate) fn set_step(&self, step: u64) {
        self.shared.doing[self.rank].step.store(step, Ordering::Relaxed);
    }

    /// The training step, if the program says.
    pub(crate) fn step(&self) -> Option<u64> {
        self.shared.doing[self.rank].step()
    }

    /// This rank's calls.
    pub(crate) fn history(&self) -> &History {
        &self.shared.doing[self.rank].history
    }

    /// The waits of this world.
    pub(crate) fn options(&self) -> &Options {
        &self.shared.options
    }

    /// All ranks.
    pub fn peers(&self) -> &[PeerInfo] {
        &self.shared.peers
    }

    /// Sets the way to the other ranks. Once, before the first collective.
    pub fn set_outbox(&self, outbox: Weak<dyn Outbox>) {
        // A second outbox would be a bug of the caller; the first one stays.
        let _ = self.shared.outbox.set(outbox);
    }

    /// Tells what happens where `env` says.
    pub(crate) fn report_to(&self, env: &LaunchEnv) {
        // Set once, by the rendezvous.
        let _ = self.shared.launch.set(env.clone());
    }

    /// Wakes `waker` at every change from now on, for as long as it lives.
    pub fn add_waker(&self, waker: Weak<dyn Wake>) {
        let mut wakers = lock(&self.shared.wakers);
        wakers.retain(|waker| waker.strong_count() > 0);
        wakers.push(waker);
    }

    /// Whether the world has ended, and why.
    ///
    /// # Errors
    /// The root cause.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.shared.ended.load(Ordering::Acquire) { self.cause() } else { Ok(()) }
    }

    #[cold]
    fn cause(&self) -> Result<()> {
        match &lock(&self.shared.state).cause {
            Some(cause) => Err(cause.clone()),
            None => Ok(()),
        }
    }

    /// Whether `rank` said goodbye. What it sent before may still be on its way.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.left[rank].load(Ordering::Acquire)
    }

    /// The error of a wait for `rank` after it left or closed its side of a group.
    pub fn left_error(&self, rank: usize) -> Error {
        Error::PeerLeft { peer: self.shared.peers[rank].clone(), during: None }
    }

    /// The error of a wait for `rank` after its connection broke.
    pub fn lost_error(&self, rank: usize, cause: impl Into<String>) -> Error {
        Error::PeerLost { peer: self.shared.peers[rank].clone(), cause: capped(cause.into()), during: None }
    }

    /// Ends the world with `cause`, on this rank at once and on all others as soon as they hear of it. If it has already
    /// ended, nothing changes. Never blocks.
    pub fn fail(&self, cause: Error) {
        self.end(cause, true);
    }

    /// Ends the world because this rank gave up.
    pub(crate) fn fail_self(&self, cause: String) {
        self.fail(Error::PeerFailed { peer: self.shared.peers[self.rank].clone(), cause: capped(cause), during: None });
    }

    /// Ends the world because the connection to `rank` broke without a goodbye.
    pub fn peer_lost(&self, rank: usize, cause: impl Into<String>) {
        self.fail(self.lost_error(rank, cause));
    }

    /// Takes in what another process' rank says.
    pub fn receive(&self, from: usize, message: ControlMessage) {
        let change = lock(&self.shared.liveness).heard(from, Instant::now());
        self.note_changes(change);
        match message {
            ControlMessage::Heartbeat(beat) => lock(&self.shared.liveness).beat(from, beat),
            // Whoever ended the world told everybody; it is passed on only when leaving, see `goodbye`.
            ControlMessage::Fail { cause } => self.end(cause, false),
            ControlMessage::Goodbye => self.mark_left(from),
            ControlMessage::Stop { track, position, what } => self.mark_stop(from, track, position, &what),
        }
    }

    /// This rank leaves. If the world has ended, it repeats why first: else a peer that has not heard it from elsewhere
    /// would take the leaving for the cause.
    pub(crate) fn goodbye(&self) {
        if let Err(cause) = self.check() {
            self.tell(&ControlMessage::Fail { cause });
        }
        self.mark_left(self.rank);
        self.tell(&ControlMessage::Goodbye);
    }

    /// See [`World::advance`](crate::World::advance).
    pub(crate) fn advance(&self, track: u64, position: u64) -> Result<()> {
        let conflict = {
            let mut state = lock(&self.shared.state);
            if let Some(cause) = &state.cause {
                return Err(cause.clone());
            }
            state.tracks.advance(self.rank, track, position, &self.shared.peers)
        };
        conflict.into_iter().for_each(|cause| self.fail(cause));
        self.check()
    }

    /// See [`World::stop`](crate::World::stop).
    pub(crate) fn stop(&self, track: u64, position: u64, what: &str) {
        self.tell(&ControlMessage::Stop { track, position, what: capped(what.to_string()) });
        self.mark_stop(self.rank, track, position, what);
    }

    /// What a collective returns instead of `error`: the root cause, with the first call of this rank that met it.
    pub(crate) fn conclude(&self, error: Error, call: &Call) -> Error {
        if error.group_usable() {
            return error.noticed_by(&call.info);
        }
        self.fail(self.explained(error.clone(), call));
        self.report();
        let cause = self.check().err().unwrap_or(error);
        let first = self.noticed_by.get_or_init(|| Box::new(call.info.clone()));
        cause.noticed_by(first)
    }

    fn mark_left(&self, rank: usize) {
        self.shared.left[rank].store(true, Ordering::Release);
        lock(&self.shared.liveness).forget(rank);
        self.wake_all();
    }

    fn mark_stop(&self, rank: usize, track: u64, position: u64, what: &str) {
        let conflict = lock(&self.shared.state).tracks.stop(rank, track, position, what, &self.shared.peers);
        conflict.into_iter().for_each(|cause| self.fail(cause));
    }

    fn end(&self, cause: Error, tell: bool) {
        let cause = cause.root_cause();
        {
            let mut state = lock(&self.shared.state);
            if state.cause.is_some() {
                return;
            }
            state.cause = Some(cause.clone());
            self.shared.ended.store(true, Ordering::Release);
        }
        // Before the others hear of it, and so before any of them can end because of it.
        self.note(&Event::Failed {
            rank: self.rank,
            culprit: cause.culprit(),
            cause: cause.to_string(),
            at: post_mortem::now_ms(),
        });
        tracing::error!(rank = self.rank, %cause, "the world ends");
        if tell {
            self.tell(&ControlMessage::Fail { cause });
        }
        self.report();
        self.wake_all();
    }

    /// Leaves this rank's report where the launcher wants it, once the world has ended.
    fn report(&self) {
        self.reported.get_or_init(|| {
            let Some(LaunchEnv { report_dir: Some(dir), .. }) = self.shared.launch.get() else { return };
            let Some(report) = self.post_mortem() else { return };
            if let Err(error) = report.write(dir) {
                tracing::warn!(%error, dir = %dir.display(), "cannot leave a report");
            }
        });
    }

    /// Tells the launcher.
    fn note(&self, event: &Event) {
        let Some(LaunchEnv { events: Some(file), .. }) = self.shared.launch.get() else { return };
        if let Err(error) = post_mortem::append(file, event) {
            tracing::warn!(%error, file = %file.display(), "cannot tell the launcher what happens");
        }
    }

    fn tell(&self, message: &ControlMessage) {
        if let Some(outbox) = self.shared.outbox.get().and_then(Weak::upgrade) {
            outbox.send_all(message);
        }
    }

    fn wake_all(&self) {
        let wakers: Vec<_> = lock(&self.shared.wakers).iter().filter_map(Weak::upgrade).collect();
        wakers.iter().for_each(|waker| waker.wake());
    }
}

impl Shared {
    fn new(peers: Vec<PeerInfo>, options: Options, liveness: Liveness, local: bool) -> Arc<Shared> {
        let state = State { cause: None, tracks: Tracks::default() };
        let left = peers.iter().map(|_| AtomicBool::new(false)).collect();
        Arc::new(Shared {
            doing: peers.iter().map(|_| Doing::new(options.history)).collect(),
            liveness: Mutex::new(liveness),
            peers,
            options,
            local,
            ended: AtomicBool::new(false),
            left,
            state: Mutex::new(state),
            wakers: Mutex::new(Vec::new()),
            outbox: OnceLock::new(),
            launch: OnceLock::new(),
        })
    }
}

/// Keeps what travels in a control message small.
fn capped(mut text: String) -> String {
    const MAX_BYTES: usize = 4096;
    if text.len() > MAX_BYTES {
        let end = (0..=MAX_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Locks, also after a panic elsewhere: no critical section here leaves its data half-written.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::call::{Collective, Members};

    #[derive(Default)]
    struct Recorder {
        sent: Mutex<Vec<ControlMessage>>,
        wakes: AtomicUsize,
    }

    impl Outbox for Recorder {
        fn send_all(&self, message: &ControlMessage) {
            lock(&self.sent).push(message.clone());
        }
    }

    impl Wake for Recorder {
        fn wake(&self) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Rank 0 of three, as in a process of its own.
    fn rank_0() -> (Arc<Health>, Arc<Recorder>) {
        let health = Health::new(0, (0..3).map(|rank| PeerInfo::here(rank, rank, 0)).collect(), Options::default());
        let recorder = Arc::new(Recorder::default());
        let (outbox, waker) = (recorder.clone() as Arc<dyn Outbox>, recorder.clone() as Arc<dyn Wake>);
        health.set_outbox(Arc::downgrade(&outbox));
        health.add_waker(Arc::downgrade(&waker));
        (health, recorder)
    }

    fn call(sequence: u64) -> Call {
        let info = CallInfo::bare(Collective::Barrier, 1, sequence, "a.rs:1:1");
        Call::new(info, Arc::new(Members::all(3)), 0, std::time::Duration::from_secs(1))
    }

    #[test]
    fn the_first_cause_is_told_once_and_stays() {
        let (health, recorder) = rank_0();
        health.peer_lost(2, "connection reset");
        health.peer_lost(1, "connection reset");
        health.fail_self("me too".to_string());
        let cause = health.check().unwrap_err();
        assert_eq!(cause.rank(), Some(2));
        assert_eq!(*lock(&recorder.sent), [ControlMessage::Fail { cause }]);
        assert_eq!(recorder.wakes.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_came_from_a_peer_is_not_passed_on() {
        let (health, recorder) = rank_0();
        let cause = health.lost_error(2, "connection reset");
        health.receive(1, ControlMessage::Fail { cause: cause.clone() });
        assert_eq!(health.check(), Err(cause));
        assert_eq!(*lock(&recorder.sent), []);
    }

    #[test]
    fn a_goodbye_ends_nothing() {
        let (health, recorder) = rank_0();
        health.receive(1, ControlMessage::Goodbye);
        assert_eq!(health.check(), Ok(()));
        assert!(health.has_left(1) && !health.has_left(2));
        assert_eq!(recorder.wakes.load(Ordering::Relaxed), 1);
        health.goodbye();
        assert_eq!(*lock(&recorder.sent), [ControlMessage::Goodbye]);
    }

    #[test]
    fn leaving_because_of_a_cause_repeats_it() {
        let (health, recorder) = rank_0();
        let cause = health.lost_error(2, "connection reset");
        health.receive(1, ControlMessage::Fail { cause: cause.clone() });
        health.goodbye();
        assert_eq!(*lock(&recorder.sent), [ControlMessage::Fail { cause }, ControlMessage::Goodbye]);
    }

    #[test]
    fn a_rank_that_passes_a_stop_tells_the_others() {
        let (health, recorder) = rank_0();
        health.receive(1, ControlMessage::Stop { track: 4, position: 3, what: "loader".to_string() });
        assert_eq!(health.advance(4, 3), Ok(()));
        let cause = health.advance(4, 4).unwrap_err();
        assert!(matches!(cause, Error::OutOfStep { ahead: 0, stopped_at: 3, position: 4, .. }), "{cause}");
        assert_eq!(*lock(&recorder.sent), [ControlMessage::Fail { cause }]);
    }

    #[test]
    fn the_first_call_that_meets_the_cause_is_shown_from_then_on() {
        let (health, recorder) = rank_0();
        let first = health.conclude(health.lost_error(2, "gone"), &call(5));
        assert!(first.to_string().contains("died during barrier #5 of group 1 called at a.rs:1:1: gone"), "{first}");
        assert_eq!(health.conclude(health.left_error(1), &call(6)), first);
        let told = ControlMessage::Fail { cause: health.lost_error(2, "gone") };
        assert_eq!(*lock(&recorder.sent), [told], "peers show their own calls");
    }

    #[test]
    fn a_refusal_ends_nothing() {
        let (health, _recorder) = rank_0();
        let refusal = Error::InvalidArgument { message: "no".to_string(), rank: None, during: None };
        assert_eq!(health.conclude(refusal, &call(1)).to_string(), "no in barrier #1 of group 1 called at a.rs:1:1");
        assert_eq!(health.check(), Ok(()));
    }

    #[test]
    fn messages_are_small() {
        let (health, recorder) = rank_0();
        health.fail_self("ü".repeat(100_000));
        health.stop(1, 1, &"x".repeat(100_000));
        for message in lock(&recorder.sent).iter() {
            assert!(postcard::to_stdvec(message).unwrap().len() < 16 * 1024);
        }
    }

    #[test]
    fn ranks_of_one_process_share_the_cause() {
        let healths = Health::shared((0..2).map(|rank| PeerInfo::here(rank, rank, 0)).collect(), Options::default());
        healths[1].fail_self("tired".to_string());
        assert_eq!(healths[0].check(), healths[1].check());
        assert_eq!(healths[0].check().unwrap_err().rank(), Some(1));
    }
}
