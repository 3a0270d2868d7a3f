//! Watching what was enqueued and nobody waits for.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use burn_ddp_comm::call::Call;
use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Error, Result};

use crate::communicator::Communicator;
use crate::device::{Device, Event};

/// A group's communicator: `None` before its first launch and after a failure. Locked for a launch, and for a look at it.
pub(crate) type Slot = Arc<Mutex<Option<Communicator>>>;

/// A collective that was enqueued.
pub(crate) struct Enqueued {
    pub(crate) slot: Slot,
    /// Recorded behind it.
    pub(crate) done: Event,
    pub(crate) call: Call,
}

/// One thread per fabric, from the first collective on that is not waited for. It ends when the fabric is gone and nothing is left.
pub(crate) struct Watchdog {
    membership: Arc<Membership>,
    device: Device,
    /// Upgraded by the thread: gone when the fabric is.
    list: Arc<List>,
    thread: Mutex<bool>,
}

#[derive(Default)]
struct List {
    /// Written by engines; taken and put back by the thread.
    enqueued: Mutex<Vec<Enqueued>>,
    /// Notified when something is added, and by the fabric when it goes.
    changed: Condvar,
}

/// Between two looks.
const LOOK: Duration = Duration::from_millis(2);

impl Watchdog {
    pub(crate) fn new(membership: Arc<Membership>, device: Device) -> Watchdog {
        Watchdog { membership, device, list: Arc::default(), thread: Mutex::new(false) }
    }

    /// Watches until it is done, aborts it when its time is over, and ends the world if that or anything else goes wrong.
    pub(crate) fn watch(self: &Arc<Watchdog>, enqueued: Enqueued) -> Result<()> {
        let mut thread = lock(&self.thread);
        if !*thread {
            let (membership, device, list, owner) =
                (self.membership.clone(), self.device.clone(), self.list.clone(), Arc::downgrade(self));
            let watch = move || keep_watch(&membership, &device, &list, &owner);
            let spawned = std::thread::Builder::new().name("nccl watchdog".to_owned()).spawn(watch);
            spawned.map_err(|error| own_failure(&self.membership, &format!("no thread can be started: {error}")))?;
            *thread = true;
        }
        lock(&self.list.enqueued).push(enqueued);
        self.list.changed.notify_all();
        Ok(())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.list.changed.notify_all();
    }
}

fn keep_watch(membership: &Membership, device: &Device, list: &List, owner: &Weak<Watchdog>) {
    if let Err(why) = device.bind() {
        membership.fail(own_failure(membership, &why));
    }
    loop {
        let mut taken = {
            let enqueued = lock(&list.enqueued);
            let idle = enqueued.is_empty();
            if idle && owner.strong_count() == 0 {
                return;
            }
            // The owner's last notification can come between the look above and the wait.
            let patience = if idle { Duration::from_millis(200) } else { LOOK };
            let waited = list.changed.wait_timeout(enqueued, patience);
            std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner).0)
        };
        taken.retain(|enqueued| goes_on(membership, enqueued));
        lock(&list.enqueued).append(&mut taken);
    }
}

/// Whether it has to be looked at again.
fn goes_on(membership: &Membership, Enqueued { slot, done, call }: &Enqueued) -> bool {
    let failure = match (done.is_done(), membership.check()) {
        (Ok(true), _) => return false,
        (_, Err(_)) => None,
        (Err(why), _) => Some(why),
        (Ok(false), Ok(())) => {
            // Whoever launches with it looks for itself.
            let found = slot.try_lock().ok().and_then(|mut slot| slot.as_mut().and_then(Communicator::async_error));
            match found {
                Some((_, why)) => Some(why),
                None if Instant::now() >= call.deadline() => {
                    membership.fail(late(call));
                    None
                }
                None => return true,
            }
        }
    };
    if let Some(why) = failure {
        membership.fail(concluded(membership, &format!("{}: {why}", call.info)));
    }
    abort(slot);
    false
}

/// Ends what it does on the device. Does not wait for that.
pub(crate) fn abort(slot: &Slot) {
    if let Some(mut communicator) = lock(slot).take() {
        communicator.give_up();
    }
}

/// The error of a collective that was enqueued and is not done in time.
fn late(call: &Call) -> Error {
    let mut error = call.timed_out(others(call));
    if let Error::Timeout { why, .. } = &mut error {
        *why = "all ranks enqueued it, but it does not complete on the device: a GPU, a link or a rank is stuck; NCCL_DEBUG=INFO says more".to_owned();
    }
    error
}

/// The group ranks that a rank can wait for.
pub(crate) fn others(call: &Call) -> Vec<usize> {
    let all = 0..call.members.count();
    let others: Vec<usize> = all.clone().filter(|peer| call.world_rank(*peer) != call.rank).collect();
    // A rank alone waits for its own device.
    if others.is_empty() { all.collect() } else { others }
}

/// What the world ends with when NCCL or the driver fails here: if that is because a rank died, that is known in a moment, and says more.
pub(crate) fn concluded(membership: &Membership, why: &str) -> Error {
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        if let Err(cause) = membership.check() {
            return cause;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    own_failure(membership, why)
}

/// This rank cannot go on.
pub(crate) fn own_failure(membership: &Membership, why: &str) -> Error {
    match membership.peers().get(membership.rank()) {
        Some(peer) => Error::PeerFailed { peer: peer.clone(), cause: why.to_owned(), during: None },
        None => Error::Internal { message: format!("rank {} of {}: {why}", membership.rank(), membership.peers().len()) },
    }
}

/// Locks, also after a panic elsewhere: no critical section here leaves its data half-written.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
