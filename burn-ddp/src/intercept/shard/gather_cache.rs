//! Cache of whole parameters that a step reads several times, as recurrent layers and tied weights do: gathered once,
//! and held until the backward ends.
//!
//! All ranks read the same values in the same order, so all hold the same. A read of a held value is no collective, so
//! the ranks compare their numbers of reads before the first reduction of a backward. Evaluation bypasses the cache.

use std::any::Any;

use super::shard_group::Purpose;

/// Most bytes that are held, unless one parameter alone is larger.
const CAP_BYTES: usize = 64 << 20;

/// Wholes of the sharded parameters of one wrapped model.
pub(super) struct GatherCache {
    slots: Vec<Reads>,
    held_bytes: usize,
    cap_bytes: usize,
}

/// Reads of one slot.
#[derive(Default)]
struct Reads {
    /// Reads since the last backward, in forward and in backward.
    forward: usize,
    backward: usize,
    /// True if there were several of a kind before the last backward ended.
    repeated: bool,
    held: Option<Held>,
}

struct Held {
    value_id: u64,
    bytes: usize,
    whole: Box<dyn Any + Send>,
}

impl GatherCache {
    /// A cache for slots of whole parameters with so many bytes each.
    pub(super) fn new(bytes: impl Iterator<Item = usize>) -> Self {
        let mut cap_bytes = CAP_BYTES;
        let slots = bytes.inspect(|bytes| cap_bytes = cap_bytes.max(*bytes)).map(|_| Reads::default()).collect();
        GatherCache { slots, held_bytes: 0, cap_bytes }
    }

    /// Counts a read of a slot. Returns the value with this number if it is held as a `T`.
    pub(super) fn read<T: Clone + 'static>(&mut self, slot: usize, value_id: u64, purpose: Purpose) -> Option<T> {
        let reads = &mut self.slots[slot];
        match purpose {
            Purpose::Forward(_) => reads.forward += 1,
            Purpose::Backward(_) => reads.backward += 1,
            _ => return None,
        }
        let held = reads.held.as_ref().filter(|held| held.value_id == value_id)?;
        held.whole.downcast_ref().cloned()
    }

    /// True if what was gathered for the latest read of a slot is to be [held](Self::hold): the slot is read several
    /// times, and there is room. Drops what is held of the slot.
    pub(super) fn wants(&mut self, slot: usize, purpose: Purpose, bytes: usize) -> bool {
        if !matches!(purpose, Purpose::Forward(_) | Purpose::Backward(_)) {
            return false;
        }
        self.drop_held(slot);
        let reads = &self.slots[slot];
        let again = reads.repeated || reads.forward > 1 || reads.backward > 1;
        again && self.held_bytes + bytes <= self.cap_bytes
    }

    /// Holds what was gathered for the latest read of a slot, of which nothing is held.
    pub(super) fn hold<T: Clone + Send + 'static>(&mut self, slot: usize, value_id: u64, bytes: usize, whole: &T) {
        self.slots[slot].held = Some(Held { value_id, bytes, whole: Box::new(whole.clone()) });
        self.held_bytes += bytes;
    }

    /// Drops all held values when a backward has ended, and notes which slots were read several times.
    pub(super) fn end_backward(&mut self) {
        for reads in &mut self.slots {
            reads.repeated = reads.forward > 1 || reads.backward > 1;
        }
        self.forget();
    }

    /// Drops all held values, and counts reads anew.
    pub(super) fn forget(&mut self) {
        for slot in 0..self.slots.len() {
            self.drop_held(slot);
            (self.slots[slot].forward, self.slots[slot].backward) = (0, 0);
        }
    }

    fn drop_held(&mut self, slot: usize) {
        if let Some(held) = self.slots[slot].held.take() {
            self.held_bytes -= held.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORWARD: Purpose = Purpose::Forward(0);
    const BACKWARD: Purpose = Purpose::Backward(0);

    /// Reads a value of 100 bytes. Returns true if it had to be gathered.
    fn gathers(cache: &mut GatherCache, slot: usize, value_id: u64, purpose: Purpose) -> bool {
        let held: Option<(usize, u64)> = cache.read(slot, value_id, purpose);
        if held.is_none() && cache.wants(slot, purpose, 100) {
            cache.hold(slot, value_id, 100, &(slot, value_id));
        }
        assert!(held.is_none_or(|held| held == (slot, value_id)));
        held.is_none()
    }

    #[test]
    fn a_slot_that_is_read_once_is_not_held() {
        let mut cache = GatherCache::new([100, 100].into_iter());
        for _ in 0..3 {
            assert!((0..2).all(|slot| gathers(&mut cache, slot, 0, FORWARD)));
            assert!((0..2).all(|slot| gathers(&mut cache, slot, 0, BACKWARD)));
            assert_eq!(cache.held_bytes, 0);
            assert!(gathers(&mut cache, 0, 0, Purpose::Evaluation) && gathers(&mut cache, 0, 0, Purpose::Evaluation));
            cache.end_backward();
        }
    }

    #[test]
    fn a_slot_that_is_read_again_is_gathered_once_from_the_next_step_on() {
        let mut cache = GatherCache::new([100, 100].into_iter());
        let mut step = |value_id| {
            let reads = [FORWARD, FORWARD, FORWARD, BACKWARD, BACKWARD, BACKWARD];
            let gathered = reads.into_iter().filter(|purpose| gathers(&mut cache, 1, value_id, *purpose)).count();
            assert_eq!(cache.held_bytes, 100);
            assert!(gathers(&mut cache, 1, value_id, Purpose::Evaluation), "evaluation reads past it");
            cache.end_backward();
            assert_eq!(cache.held_bytes, 0);
            assert!(gathers(&mut cache, 1, value_id, Purpose::Evaluation));
            assert_eq!(cache.held_bytes, 0);
            gathered
        };
        assert_eq!([step(0), step(1), step(1)], [2, 1, 1]);
    }

    /// Burn's trainer forgets values once more, after the step, when nothing has been read since the backward.
    #[test]
    fn forgetting_values_keeps_which_slots_are_read_again() {
        let mut cache = GatherCache::new([100].into_iter());
        let step = |cache: &mut GatherCache, value_id| {
            let gathered = (0..3).filter(|_| gathers(cache, 0, value_id, FORWARD)).count();
            cache.end_backward();
            gathered
        };
        assert_eq!(step(&mut cache, 0), 2);
        cache.forget();
        assert_eq!(step(&mut cache, 0), 1);
        // A read after the backward holds the value that the step replaces, which has the same number in the trainer.
        assert!(gathers(&mut cache, 0, 0, FORWARD) && !gathers(&mut cache, 0, 0, FORWARD));
        cache.forget();
        assert_eq!((cache.held_bytes, step(&mut cache, 0)), (0, 1));
    }

    #[test]
    fn another_value_or_type_is_gathered() {
        let mut cache = GatherCache::new([100].into_iter());
        assert!(gathers(&mut cache, 0, 0, FORWARD) && gathers(&mut cache, 0, 0, FORWARD));
        assert!(!gathers(&mut cache, 0, 0, FORWARD));
        assert_eq!(cache.read::<String>(0, 0, FORWARD), None);
        assert!(gathers(&mut cache, 0, 7, FORWARD) && gathers(&mut cache, 0, 0, FORWARD));
        assert_eq!(cache.held_bytes, 100);
    }

    #[test]
    fn what_has_no_room_is_gathered_each_time() {
        let mut cache = GatherCache::new([100; 3].into_iter());
        cache.cap_bytes = 200;
        let mut all = || -> Vec<bool> { (0..3).map(|slot| gathers(&mut cache, slot, 0, FORWARD)).collect() };
        assert_eq!([all(), all(), all()], [[true; 3], [true; 3], [false, false, true]]);
        assert_eq!(cache.held_bytes, 200);
        assert_eq!(GatherCache::new([CAP_BYTES + 1, 1].into_iter()).cap_bytes, CAP_BYTES + 1);
    }
}
