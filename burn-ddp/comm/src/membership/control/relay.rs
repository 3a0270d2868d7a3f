//! Messages between ranks that have no control connection: passed on by this rank.

use std::time::Duration;

use super::Shared;
use crate::membership::{ControlMessage, Envelope, Membership};
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
        if !routes.may_pass_on(from, origin) {
            return Err(format!("it passed on a message of rank {origin}"));
        }
        self.pass_on(from, origin, &message, membership);
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
        for to in membership.routes().onward(from, origin, |rank| membership.has_left(rank)) {
            self.send(to, origin, std::slice::from_ref(message));
        }
    }

    /// Sends messages of `origin` to a neighbour; the monitor writes what remains.
    fn send(&self, to: usize, origin: usize, messages: &[ControlMessage]) {
        let mut senders = lock(&self.senders);
        let Some(Some(sender)) = senders.get_mut(to) else { return };
        for message in messages {
            let heartbeat = matches!(message, ControlMessage::Heartbeat(_));
            let message = Envelope { origin, message };
            let _all_written = if heartbeat { sender.beat(&message) } else { sender.send(&message, false) };
        }
    }
}
