//! Link of a launcher to the others while a job runs: sends signs of life, watches the others' signs of life, and
//! passes on the end of a generation.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn_ddp_comm::Store;

use super::launcher_messages::{put_new, take};
use crate::event::{Event, Stop, Trouble};
use crate::signals;

/// Interval between two signs of life.
const BEAT: Duration = Duration::from_secs(1);
/// Time of failing calls after which node 0's store counts as gone.
const REFUSED: Duration = Duration::from_secs(5);
/// Longest time that Ctrl-Z is delayed to announce the pause to the other launchers.
const PAUSE: Duration = Duration::from_secs(2);

/// Handle of the two threads of the link; dropping it ends them within about a beat.
pub(crate) struct Link {
    shared: Arc<Shared>,
    posts: Sender<Post>,
}

struct Post {
    key: String,
    stop: Stop,
}

/// State shared by the launcher's main thread and the threads of the link.
struct Shared {
    store: Arc<dyn Store>,
    node: usize,
    nnodes: usize,
    patience: Duration,
    /// Set by the main thread when a generation starts, read by the listener.
    generation: AtomicU32,
    /// Set when the link is dropped.
    over: AtomicBool,
    /// Nodes that gave no sign of life for too long, each with the length of its silence. Written by node 0's listener.
    lost: Mutex<BTreeMap<usize, Duration>>,
    /// The latest generation whose end was published, and why it ended. Written by the listener.
    stopped: Mutex<Option<(u32, Stop)>>,
    /// Reason why node 0's store cannot be reached any more. Written by the listener.
    cut: Mutex<Option<Trouble>>,
}

impl Link {
    pub(crate) fn start(
        store: Arc<dyn Store>,
        node: usize,
        nnodes: usize,
        patience: Duration,
        events: Sender<Event>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            store,
            node,
            nnodes,
            patience,
            generation: AtomicU32::new(0),
            over: AtomicBool::new(false),
            lost: Mutex::default(),
            stopped: Mutex::default(),
            cut: Mutex::default(),
        });
        let listener = Listener::new(shared.clone(), events);
        thread::Builder::new().name("burn-ddp-nodes".into()).spawn(move || listener.run())?;
        let (posts, queue) = mpsc::channel();
        let poster = shared.clone();
        thread::Builder::new().name("burn-ddp-post".into()).spawn(move || poster.post_all(&queue))?;
        Ok(Self { shared, posts })
    }

    pub(crate) fn enter(&self, generation: u32) {
        self.shared.generation.store(generation, Ordering::Release);
    }

    /// Publishes that the generation is over, or that its ranks have to end at once. Does not block.
    pub(crate) fn stop(&self, stop: Stop) {
        let kind = if matches!(stop, Stop::Hurried { .. }) { "hurry" } else { "stop" };
        let key = format!("{}/{kind}", self.shared.generation.load(Ordering::Acquire));
        // Cannot fail: the receiving thread ends when this sender is dropped.
        let _ = self.posts.send(Post { key, stop });
    }

    /// Stops this process (Ctrl-Z) while no rank runs.
    pub(crate) fn suspend(&self) {
        self.pause(true);
        if let Err(error) = signals::stop_here() {
            tracing::warn!(%error, "cannot stop this process");
        }
        self.pause(false);
    }

    /// Publishes that this process is about to stop for a while, or goes on. Waits briefly, so that the others see it
    /// first and do not count the pause as silence.
    pub(crate) fn pause(&self, paused: bool) {
        let (shared, (done, heard)) = (self.shared.clone(), mpsc::channel());
        let started = thread::Builder::new().spawn(move || {
            let set = shared.store.set(&beat_key(shared.node), if paused { b"paused" } else { b"0" });
            // Sending fails if `pause` no longer waits.
            let _ = done.send(set);
        });
        let set = started.ok().and_then(|_| heard.recv_timeout(PAUSE).ok());
        if !matches!(set, Some(Ok(()))) {
            tracing::warn!("the pause could not be announced to the other launchers");
        } else if paused && self.shared.node == 0 {
            // The store stops with this process. The others read this node's beat once per `BEAT`.
            thread::sleep(BEAT + BEAT / 2);
        }
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        self.shared.store.clone()
    }

    pub(crate) fn lost(&self) -> BTreeMap<usize, Duration> {
        lock(&self.shared.lost).clone()
    }

    /// Reason for the end of the generation, once it was published, also if this machine has not started it yet.
    pub(crate) fn stopped(&self, generation: u32) -> Option<Stop> {
        lock(&self.shared.stopped).clone().filter(|(ended, _)| *ended == generation).map(|(_, stop)| stop)
    }

    /// A function for another thread: true once the end of the generation was published, or node 0 cannot be reached.
    pub(crate) fn end_of(&self, generation: u32) -> impl Fn() -> bool + Send + use<> {
        let shared = self.shared.clone();
        move || {
            let stopped = lock(&shared.stopped).as_ref().is_some_and(|(ended, _)| *ended == generation);
            stopped || lock(&shared.cut).is_some()
        }
    }

    pub(crate) fn cut(&self) -> Option<Trouble> {
        lock(&self.shared.cut).clone()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
    }
}

impl Shared {
    fn post_all(&self, queue: &Receiver<Post>) {
        while let Ok(Post { key, stop }) = queue.recv() {
            if let Err(error) = put_new(&*self.store, &key, &stop) {
                tracing::warn!(%error, "the end of the job could not be published to the other launchers");
            }
        }
    }
}

struct Listener {
    shared: Arc<Shared>,
    events: Sender<Event>,
    beat: u64,
    /// Last beat of each watched node, and the time at which it changed. Node 0 watches all, the others watch node 0.
    heard: BTreeMap<usize, (Vec<u8>, Instant)>,
    /// Latest generation whose end was passed on to the main thread, and the latest that was then hurried.
    passed_on: Option<u32>,
    hurried: Option<u32>,
    /// Time since which all calls to the store have failed; `None` while they succeed.
    failing: Option<Instant>,
}

impl Listener {
    fn new(shared: Arc<Shared>, events: Sender<Event>) -> Self {
        let watched = if shared.node == 0 { 1..shared.nnodes } else { 0..1 };
        let heard = watched.map(|node| (node, (Vec::new(), Instant::now()))).collect();
        Self { shared, events, beat: 0, heard, passed_on: None, hurried: None, failing: None }
    }

    fn run(mut self) {
        while !self.shared.over.load(Ordering::Acquire) {
            let start = Instant::now();
            match self.turn() {
                Ok(()) => self.failing = None,
                Err(error) => self.on_error(&error.to_string(), start),
            }
            if start.elapsed() > self.shared.patience {
                // This process itself was stopped or slow, so the other nodes' beats may be unread: they get new time.
                let now = Instant::now();
                self.heard.values_mut().for_each(|(_, at)| *at = now);
                self.failing = None;
            }
            if lock(&self.shared.cut).is_some() {
                return;
            }
        }
    }

    fn turn(&mut self) -> burn_ddp_comm::Result<()> {
        let shared = self.shared.clone();
        self.beat += 1;
        shared.store.set(&beat_key(shared.node), self.beat.to_string().as_bytes())?;
        self.listen_for_life()?;
        let generation = shared.generation.load(Ordering::Acquire);
        if self.passed_on == Some(generation) {
            let hurry = || take::<Stop>(&*shared.store, &format!("{generation}/hurry"), Duration::ZERO);
            if self.hurried != Some(generation)
                && let Some(stop) = hurry()?
            {
                self.hurried = Some(generation);
                // Fails only if the main thread, and with it the job, has ended.
                let _ = self.events.send(Event::Ordered { generation, stop });
            }
            thread::sleep(BEAT / 4);
        } else if let Some(stop) = take::<Stop>(&*shared.store, &format!("{generation}/stop"), BEAT)? {
            self.passed_on = Some(generation);
            *lock(&shared.stopped) = Some((generation, stop.clone()));
            // Fails only if the main thread, and with it the job, has ended.
            let _ = self.events.send(Event::Ordered { generation, stop });
        }
        Ok(())
    }

    fn listen_for_life(&mut self) -> burn_ddp_comm::Result<()> {
        let (shared, now) = (self.shared.clone(), Instant::now());
        for (&node, (last, at)) in &mut self.heard {
            let beat = match shared.store.get(&beat_key(node), Duration::ZERO) {
                Ok(beat) => beat,
                Err(burn_ddp_comm::Error::StoreTimeout { .. }) => Vec::new(),
                Err(error) => return Err(error),
            };
            if beat != *last || beat == b"paused" {
                (*last, *at) = (beat, now);
            } else if shared.node == 0 && now - *at > shared.patience {
                let silent = now - *at;
                if lock(&shared.lost).insert(node, silent).is_none() {
                    let key = format!("{}/stop", shared.generation.load(Ordering::Acquire));
                    put_new(&*shared.store, &key, &Stop::Trouble(lost(node, silent)))?;
                }
            }
        }
        Ok(())
    }

    fn on_error(&mut self, error: &str, start: Instant) {
        let paused = self.heard.get(&0).is_some_and(|(beat, _)| beat == b"paused");
        let since = *self.failing.get_or_insert(start);
        if !paused && since.elapsed() >= REFUSED.min(self.shared.patience) {
            let trouble =
                Trouble { message: format!("node 0's launcher cannot be reached any more: {error}"), exit_code: 1 };
            *lock(&self.shared.cut) = Some(trouble.clone());
            // Fails only if the main thread has ended.
            let _ = self.events.send(Event::Cut(trouble));
        }
        thread::sleep(BEAT / 4);
    }
}

/// The error of a job with a machine that was silent for `silent`.
pub(crate) fn lost(node: usize, silent: Duration) -> Trouble {
    let silent = silent.as_secs_f64();
    let message = format!(
        "node {node} is lost: its launcher has given no sign of life for {silent:.0} s; \
         the machine, its network or burnrun there ended"
    );
    Trouble { message, exit_code: 1 }
}

fn beat_key(node: usize) -> String {
    format!("beat/{node}")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
