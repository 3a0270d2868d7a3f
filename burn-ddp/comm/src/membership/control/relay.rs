//! Passing on of messages between ranks that have no control connection.

use std::time::Duration;

use super::{Sender, Shared};
use crate::membership::{ControlMessage, Envelope, Heartbeat, Membership};
use crate::poison_free_locks::lock;
use crate::post_mortem::millis;

impl Shared {
    /// Takes a message that the neighbour `from` has sent: passes it on, then applies it. An error if `from` should not
    /// have sent it.
    pub(super) fn receive(
        &self,
        from: usize,
        Envelope { origin, message }: Envelope<ControlMessage>,
        membership: &Membership,
    ) -> Result<(), String> {
        let routes = membership.routes();
        let strange = match &message {
            ControlMessage::PassedOn(_) if origin != from => Some(origin),
            ControlMessage::PassedOn(beats) => {
                beats.iter().map(|(origin, _)| *origin).find(|origin| !routes.may_pass_on_beat(from, *origin))
            }
            _ => Some(origin).filter(|origin| !routes.may_pass_on(from, *origin)),
        };
        if let Some(origin) = strange {
            return Err(format!("it passed on a message of rank {origin} that it should not pass on"));
        }
        match &message {
            ControlMessage::Heartbeat(beat) => self.pass_on_later(from, origin, beat, membership),
            ControlMessage::PassedOn(beats) => {
                beats.iter().for_each(|(origin, beat)| self.pass_on_later(from, *origin, beat, membership));
            }
            // The membership sends it to all neighbours, in this rank's name.
            ControlMessage::Fail { .. } => {}
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

    /// Sends the report that the neighbour `peer` is silent to the ranks to which this rank passes on its messages.
    pub(super) fn report_silence(&self, peer: usize, silent: Duration, membership: &Membership) {
        let message = ControlMessage::Silent { silent_ms: millis(silent) };
        self.pass_on(peer, peer, &message, membership);
    }

    fn pass_on(&self, from: usize, origin: usize, message: &ControlMessage, membership: &Membership) {
        for to in membership.routes().onward(from, origin, false, |rank| membership.has_left(rank)) {
            self.send(to, origin, std::slice::from_ref(message));
        }
    }

    /// Notes a heartbeat, which the monitor soon passes on together with others.
    fn pass_on_later(&self, from: usize, origin: usize, beat: &Heartbeat, membership: &Membership) {
        let onward = membership.routes().onward(from, origin, true, |rank| membership.has_left(rank));
        let mut senders = lock(&self.senders);
        for to in onward {
            if let Some(Some(sender)) = senders.get_mut(to) {
                sender.beats.insert(origin, beat.clone());
            }
        }
    }

    /// Adopts the fallback connection of `peer`: sends it what it may have missed of the ranks of this machine.
    pub(super) fn introduce(&self, peer: usize, sender: Sender, membership: &Membership) {
        lock(&self.senders)[peer] = Some(sender);
        membership.connected(peer);
        for origin in membership.routes().of_machine() {
            self.send(peer, *origin, &membership.known_of(*origin));
        }
    }

    /// Sends messages of `origin` to a neighbour. The monitor writes the bytes that the socket does not take now.
    pub(super) fn send(&self, to: usize, origin: usize, messages: &[ControlMessage]) {
        let mut senders = lock(&self.senders);
        let Some(Some(sender)) = senders.get_mut(to) else { return };
        // A heartbeat of `origin` that waits to be passed on is older than these messages.
        sender.beats.remove(&origin);
        for message in messages {
            let _all_written = sender.send(&Envelope { origin, message }, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::alone;
    use super::*;

    #[test]
    fn a_rank_passes_on_heartbeats_in_its_own_name_and_of_no_other_neighbour() {
        // Rank 1 is on this machine, rank 2 a counterpart on the other, and rank 3 is heard through both.
        let (control, membership, _) = alone(&[0, 0, 1, 1]);
        let takes = |from: usize, origin: usize, of: &[usize]| {
            let beats = of.iter().map(|rank| (*rank, Heartbeat::default())).collect();
            let message = ControlMessage::PassedOn(beats);
            control.shared.receive(from, Envelope { origin, message }, &membership).is_ok()
        };
        assert!(takes(1, 1, &[3]) && takes(2, 2, &[3]));
        for (from, origin, of) in [(1, 2, &[3][..]), (1, 3, &[3]), (2, 3, &[]), (1, 9, &[]), (1, 1, &[2]), (2, 2, &[1])]
        {
            assert!(!takes(from, origin, of), "rank {from}, as rank {origin}, of ranks {of:?}");
        }
        let says = |from, origin| {
            let message = ControlMessage::Goodbye;
            control.shared.receive(from, Envelope { origin, message }, &membership).is_ok()
        };
        assert!(!says(1, 2) && !says(2, 1) && !says(1, 0), "of ranks that are heard themselves, and of this one");
        assert!(says(1, 3));
    }
}
