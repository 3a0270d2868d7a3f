//! Buffers in which buckets are reduced, taken in turn.

use burn_ddp_comm::SharedBuffer;

use super::bucket_plan::{Bucket, Plan};

/// Memory for a fixed number of buckets: awake bucket `i` uses buffer `i % len`, the same one on all ranks.
///
/// Dormant buckets, which are hardly ever reduced, have plain memory of their own, empty until it is needed.
#[derive(Debug, Default)]
pub(super) struct BufferRing {
    /// Buffers of the awake buckets; `None` while a reduction has one.
    ring: Vec<Option<SharedBuffer>>,
    /// Buffer of each dormant bucket; `None` while a reduction has it.
    dormant: Vec<Option<SharedBuffer>>,
    /// Number of awake buckets.
    awake: usize,
}

impl BufferRing {
    /// Lengths of the buffers of a ring for `plan`, in bytes: of `len` buffers, or of one per awake bucket.
    pub(super) fn lens_bytes(plan: &Plan, len: Option<usize>) -> Vec<usize> {
        let awake = &plan.buckets[..plan.awake];
        let len = len.unwrap_or(awake.len()).clamp(1, awake.len());
        let largest = |nth| awake.iter().skip(nth).step_by(len).map(Bucket::total_bytes).max().unwrap_or(0);
        (0..len).map(largest).collect()
    }

    /// A ring of `buffers`, made with the lengths of [`lens_bytes`](Self::lens_bytes).
    pub(super) fn new(plan: &Plan, buffers: Vec<SharedBuffer>) -> Self {
        let dormant = plan.buckets.len() - plan.awake;
        BufferRing {
            ring: buffers.into_iter().map(Some).collect(),
            dormant: (0..dormant).map(|_| Some(SharedBuffer::plain(0))).collect(),
            awake: plan.awake,
        }
    }

    /// True if the buffer of `bucket` is free.
    pub(super) fn is_free(&mut self, bucket: usize) -> bool {
        self.buffer(bucket).is_some()
    }

    /// The place of `slot` in the buffer of its bucket, to be written before the buffer is [taken](Self::take); `None`
    /// if a reduction has the buffer, if one of another bucket comes first (`next` is the next one), or if the bucket
    /// is dormant.
    pub(super) fn place(&mut self, plan: &Plan, slot: usize, next: usize) -> Option<&mut [u8]> {
        let range = &plan.ranges[slot];
        let nth = range.bucket.checked_sub(next)?;
        if nth >= self.ring.len() || range.bucket >= self.awake {
            return None;
        }
        let buffer = self.buffer(range.bucket).as_mut()?;
        buffer.set_len(plan.buckets[range.bucket].total_bytes());
        Some(&mut buffer.bytes_mut()[range.bytes()])
    }

    /// Takes the buffer of `bucket`, `len_bytes` long; `None` if a reduction has it.
    pub(super) fn take(&mut self, bucket: usize, len_bytes: usize) -> Option<SharedBuffer> {
        let mut buffer = self.buffer(bucket).take()?;
        buffer.set_len(len_bytes);
        Some(buffer)
    }

    /// Returns the buffer of `bucket` after its reduction.
    pub(super) fn put_back(&mut self, bucket: usize, buffer: SharedBuffer) {
        *self.buffer(bucket) = Some(buffer);
    }

    /// True if no reduction has a buffer.
    pub(super) fn is_complete(&self) -> bool {
        self.ring.iter().chain(&self.dormant).all(Option::is_some)
    }

    fn buffer(&mut self, bucket: usize) -> &mut Option<SharedBuffer> {
        match bucket.checked_sub(self.awake) {
            Some(dormant) => &mut self.dormant[dormant],
            None => {
                let nth = bucket % self.ring.len();
                &mut self.ring[nth]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_ddp_comm::DType;

    use super::super::bucket_plan::{Caps, Slot};
    use super::*;

    fn plan() -> Plan {
        let slot = |nth: usize, trainable| Slot {
            path: nth.to_string(),
            dims: vec![10 + nth],
            dtype: DType::F32,
            trainable,
            sharded: false,
        };
        let slots: Vec<_> = (0..6).map(|nth| slot(nth, nth > 0)).collect();
        Plan::new(&slots, &[], Caps { first_bytes: 4, bytes: 4 }, true)
    }

    #[test]
    fn buckets_take_turns() {
        let plan = plan();
        assert_eq!((plan.awake, plan.buckets.len()), (5, 6));
        // Buckets 0 to 4 have 16, 15, 14, 13 and 12 elements with their flags; the last one also two flags more.
        assert_eq!(BufferRing::lens_bytes(&plan, Some(3)), [64, 60, 56]);
        assert_eq!(BufferRing::lens_bytes(&plan, None), [64, 60, 56, 52, 56]);
        let buffers = BufferRing::lens_bytes(&plan, Some(3)).into_iter().map(SharedBuffer::plain).collect();
        let mut ring = BufferRing::new(&plan, buffers);
        let first = ring.take(0, 64).unwrap();
        assert!(!ring.is_free(3) && ring.is_free(4) && !ring.is_complete());
        assert!(ring.take(3, 52).is_none());
        ring.put_back(0, first);
        assert!(ring.is_complete());
        assert_eq!(ring.take(3, 52).unwrap().len_bytes(), 52);
        let dormant = ring.take(5, 44).unwrap();
        assert_eq!(dormant.len_bytes(), 44);
        ring.put_back(5, dormant);
        assert!(ring.is_free(5) && !ring.is_complete());
    }

    #[test]
    fn a_buffer_has_places_for_the_bucket_whose_turn_it_is() {
        let plan = plan();
        let buffers = BufferRing::lens_bytes(&plan, Some(3)).into_iter().map(SharedBuffer::plain).collect();
        let mut ring = BufferRing::new(&plan, buffers);
        let slot_of = |bucket: usize| plan.buckets[bucket].slots[0];
        let (first, fourth, dormant) = (slot_of(0), slot_of(3), slot_of(5));
        ring.place(&plan, first, 0).unwrap().fill(7);
        assert!(ring.place(&plan, fourth, 0).is_none(), "bucket 0 has the buffer first");
        assert!(ring.place(&plan, dormant, 0).is_none());
        let mut taken = ring.take(0, plan.buckets[0].total_bytes()).unwrap();
        assert_eq!(taken.bytes_mut()[plan.ranges[first].bytes()], [7; 60]);
        assert!(ring.place(&plan, fourth, 1).is_none(), "a reduction has the buffer");
        ring.put_back(0, taken);
        assert_eq!(ring.place(&plan, fourth, 1).unwrap().len(), 48);
    }
}
