//! Messages between ranks that have no control connection: passed on by this rank.

use std::time::Duration;

use super::{Sender, Shared};
use crate::membership::{ControlMessage, Envelope, Heartbeat, Membership};
use crate::poison_free_locks::lock;
use crate::post_mortem::millis;

impl Shared {
    /// Takes a message that the neighbour `from` has sent: passes it on, then applies it. An error if that rank has no
    /// part in it.
    pub(super) fn receive(
        &self,
        from: usize,
        Envelope { origin, message }: Envelope<ControlMessage>,
        membership: &Membership,
    ) -> Result<(), String> {
        let routes = membership.routes();
        let origins: Vec<usize> = match &message {
            ControlMessage::PassedOn(beats) => beats.iter().map(|(origin, _)| *origin).collect(),
            _ => vec![origin],
        };
        if let Some(origin) = origins.iter().find(|origin| !routes.may_pass_on(from, **origin)) {
            return Err(format!("it passed on a message of rank {origin}"));
        }
        match &message {
            ControlMessage::Heartbeat(beat) => self.pass_on_later(from, origin, beat, membership),
            ControlMessage::PassedOn(beats) => {
                beats.iter().for_each(|(origin, beat)| self.pass_on_later(from, *origin, beat, membership));
            }
            message => self.pass_on(from, origin, message, membership),
        }
        let leaves = message == ControlMessage::Goodbye && !membership.has_left(origin);
        membership.receive(origin, message);
        if leaves {
            for (origin, to) in routes.inherited(origin, |rank| membership.has_left(rank)) {
                self.send(to, origin, &membership.known_of(origin));
            }
        }
        Ok(())
    }

    /// Reports that the neighbour `peer` fell silent to the ranks that hear it through this one.
    pub(super) fn report_silence(&self, peer: usize, silent: Duration, membership: &Membership) {
        let message = ControlMessage::Silent { silent_ms: millis(silent) };
        self.pass_on(peer, peer, &message, membership);
    }

    fn pass_on(&self, from: usize, origin: usize, message: &ControlMessage, membership: &Membership) {
        for to in membership.routes().onward(from, origin, false, |rank| membership.has_left(rank)) {
            self.send(to, origin, std::slice::from_ref(message));
        }
    }

    /// Passes on a heartbeat, soon, together with others.
    fn pass_on_later(&self, from: usize, origin: usize, beat: &Heartbeat, membership: &Membership) {
        let onward = membership.routes().onward(from, origin, true, |rank| membership.has_left(rank));
        let mut senders = lock(&self.senders);
        for to in onward {
            if let Some(Some(sender)) = senders.get_mut(to) {
                sender.beats.insert(origin, beat.clone());
            }
        }
    }

    /// Begins with a neighbour that connected when its machine had been cut off: it hears what it may have missed.
    pub(super) fn introduce(&self, peer: usize, sender: Sender, membership: &Membership) {
        lock(&self.senders)[peer] = Some(sender);
        membership.connected(peer);
        for origin in membership.routes().of_machine() {
            self.send(peer, *origin, &membership.known_of(*origin));
        }
    }

    /// Sends messages of `origin` to a neighbour; the monitor writes what remains.
    pub(super) fn send(&self, to: usize, origin: usize, messages: &[ControlMessage]) {
        let mut senders = lock(&self.senders);
        let Some(Some(sender)) = senders.get_mut(to) else { return };
        // The heartbeat that waits is older than they are.
        sender.beats.remove(&origin);
        for message in messages {
            let _all_written = sender.send(&Envelope { origin, message }, false);
        }
    }
}
