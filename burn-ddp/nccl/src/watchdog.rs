//! Watches enqueued collectives that no thread waits for.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use burn_ddp_comm::membership::Membership;
use burn_ddp_comm::{Call, Error, Result};

use crate::communicator::{Communicator, SharedCommunicator, abort};
use crate::device::Device;
use crate::error::{awaited_ranks, own_failure, root_cause};
use crate::event::Event;
use crate::poison_free_lock::lock;
use crate::process_end;

/// A collective that was enqueued.
pub(crate) struct Enqueued {
    pub(crate) communicator: SharedCommunicator,
    /// Event recorded behind the collective.
    pub(crate) done: Event,
    pub(crate) call: Call,
}

/// Watchdog of one fabric. Its thread starts with the first enqueued collective, and ends when the fabric is dropped
/// and every collective is done, or when the process ends.
pub(crate) struct Watchdog {
    membership: Arc<Membership>,
    device: Device,
    list: Arc<List>,
    /// True once the thread was started.
    thread: Mutex<bool>,
}

#[derive(Default)]
struct List {
    /// Engines add to it; the thread takes all out, and puts back what is not done.
    enqueued: Mutex<Vec<Enqueued>>,
    /// Notified when a collective is added, and when the fabric is dropped.
    changed: Condvar,
}

/// Time between two polls of the enqueued collectives.
const LOOK: Duration = Duration::from_millis(2);

impl Watchdog {
    pub(crate) fn new(membership: Arc<Membership>, device: Device) -> Watchdog {
        Watchdog { membership, device, list: Arc::default(), thread: Mutex::new(false) }
    }

    /// Watches `enqueued` until it is done. Aborts it and ends the world if it fails or is not done in time.
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
            // The owner can be dropped between the check above and the wait, whose notification is then missed.
            let patience = if idle { Duration::from_millis(200) } else { LOOK };
            let waited = list.changed.wait_timeout(enqueued, patience);
            std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner).0)
        };
        let Some(_in_use) = process_end::in_use() else { return };
        taken.retain(|enqueued| goes_on(membership, enqueued));
        lock(&list.enqueued).append(&mut taken);
    }
}

/// True if the collective is still under way.
fn goes_on(membership: &Membership, Enqueued { communicator, done, call }: &Enqueued) -> bool {
    let failure = match (done.is_done(), membership.check()) {
        (Ok(true), _) => return false,
        (_, Err(_)) => None,
        (Err(why), _) => Some(why),
        (Ok(false), Ok(())) => {
            // A thread that launches with the communicator holds the lock, and checks for errors itself.
            let found =
                communicator.try_lock().ok().and_then(|mut own| own.as_mut().and_then(Communicator::async_error));
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
        membership.fail(root_cause(membership, &format!("{}: {why}", call.info)));
    }
    abort(communicator);
    false
}

/// Error of a collective that was enqueued but is not done in time.
fn late(call: &Call) -> Error {
    let mut error = call.timed_out(awaited_ranks(call));
    if let Error::Timeout { why, .. } = &mut error {
        *why = "all ranks enqueued it, but it does not complete on the device: a GPU, a link or a rank is stuck; \
                NCCL_DEBUG=INFO says more"
            .to_owned();
    }
    error
}
