//! Plan of the buckets: a pure function of inputs that all ranks share.

use std::ops::Range;

use burn_ddp_comm::DType;

/// A parameter as the reducer sees it. The slot number is its index in traversal order, the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Module path, `encoder.0.weight`.
    pub path: String,
    pub dims: Vec<usize>,
    pub dtype: DType,
    /// True if it required a gradient when the model was wrapped.
    pub trainable: bool,
    /// True if each rank holds a part of the parameter: its gradient is in no bucket.
    pub sharded: bool,
}

/// Type in which values of `dtype` are added up: f64 for f64, and f32 otherwise.
pub(crate) fn sum_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

impl Slot {
    /// The slot with the type in which its gradients are added up.
    pub(crate) fn widened(&self) -> Slot {
        Slot { dtype: sum_dtype(self.dtype), ..self.clone() }
    }

    pub(crate) fn len_elems(&self) -> usize {
        self.dims.iter().product()
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_elems() * self.dtype.size_bytes()
    }
}

/// A run of gradients of one dtype that travel in one collective.
///
/// Its buffer holds the gradients in the order of `slots` (if the bucket is `packed`), then one flag per slot: infinity
/// before the reduction if this rank has a gradient (NaN if that is not finite), and not 0 after it if any rank with a
/// weight has one. The last awake bucket has one element more if any is dormant, the *wake* flag, raised by a rank that
/// has a gradient for a dormant bucket; one more if parameters are sharded, the flag of their gradients; and always one
/// more, the *stop* flag, raised by a rank with a weight that wishes to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub dtype: DType,
    pub slots: Vec<usize>,
    /// Elements of all gradients, without flags.
    pub len_elems: usize,
    pub has_wake_flag: bool,
    pub has_sharded_flag: bool,
    pub has_stop_flag: bool,
    /// True if all its parameters were frozen when the model was wrapped: it is reduced only in steps whose wake flag
    /// is up.
    pub dormant: bool,
    /// True if the gradients are in the buffer; if false, they stay on their device, and the buffer has flags only.
    pub packed: bool,
}

impl Bucket {
    /// Elements before the flags.
    fn gradient_elems(&self) -> usize {
        if self.packed { self.len_elems } else { 0 }
    }

    /// Number of flags.
    fn flags(&self) -> usize {
        let more = [self.has_wake_flag, self.has_sharded_flag, self.has_stop_flag];
        self.slots.len() + more.into_iter().filter(|has| *has).count()
    }

    /// Elements of its buffer.
    pub(crate) fn total_elems(&self) -> usize {
        self.gradient_elems() + self.flags()
    }

    /// Bytes of its buffer.
    pub(crate) fn total_bytes(&self) -> usize {
        self.total_elems() * self.dtype.size_bytes()
    }

    /// Bytes that are reduced, in the buffer and on the device.
    pub(crate) fn reduced_bytes(&self) -> usize {
        (self.len_elems + self.flags()) * self.dtype.size_bytes()
    }

    /// Element index of the flag of the `nth` slot of this bucket.
    pub(crate) fn flag_elem(&self, nth: usize) -> usize {
        self.gradient_elems() + nth
    }

    /// Element index of the wake flag.
    pub(crate) fn wake_elem(&self) -> Option<usize> {
        self.has_wake_flag.then(|| self.flag_elem(self.slots.len()))
    }

    /// Element index of the flag of sharded gradients.
    pub(crate) fn sharded_elem(&self) -> Option<usize> {
        self.has_sharded_flag.then(|| self.flag_elem(self.slots.len() + usize::from(self.has_wake_flag)))
    }

    /// Element index of the stop flag.
    pub(crate) fn stop_elem(&self) -> Option<usize> {
        self.has_stop_flag.then(|| self.flag_elem(self.flags() - 1))
    }

    /// True if a flag about gradients of other buckets is in this one: it is known only when all gradients are.
    pub(crate) fn comes_last(&self) -> bool {
        self.has_wake_flag || self.has_sharded_flag
    }
}

/// Range of a slot in its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketRange {
    pub bucket: usize,
    /// Position among the slots of the bucket.
    pub nth: usize,
    /// First byte in the buffer of a packed bucket.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
}

impl BucketRange {
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The buckets in the order in which every rank reduces them; dormant ones last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub buckets: Vec<Bucket>,
    pub ranges: Vec<BucketRange>,
    /// Buckets `0..awake` are reduced in every step.
    pub awake: usize,
}

/// Size limits of buckets, in bytes of gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caps {
    /// The first bucket of each plan is small, so that communication starts early.
    pub first_bytes: usize,
    pub bytes: usize,
}

impl Plan {
    /// Cuts `order` (slot numbers, expected order of arrival) into buckets. Slots that `order` leaves out follow in
    /// reverse traversal order, which is the order in which a plain feed-forward model produces gradients. `packed` as
    /// in [`Bucket`].
    pub(crate) fn new(slots: &[Slot], order: &[usize], caps: Caps, packed: bool) -> Self {
        let mut seen = vec![false; slots.len()];
        let mut full: Vec<usize> = Vec::with_capacity(slots.len());
        for slot in order.iter().copied().chain((0..slots.len()).rev()) {
            if slot < slots.len() && !std::mem::replace(&mut seen[slot], true) {
                full.push(slot);
            }
        }
        let mut buckets: Vec<Bucket> = Vec::new();
        for dormant in [false, true] {
            let first = buckets.len();
            let takes = |slot: &Slot| !slot.sharded && slot.trainable != dormant;
            for &slot in full.iter().filter(|&&slot| takes(&slots[slot])) {
                // Buckets of other dtypes stay open while this one fills: mixed precision must not shatter the plan.
                let open = buckets[first..].iter().rposition(|b| b.dtype == slots[slot].dtype).map(|i| first + i);
                match open {
                    Some(i)
                        if fits(&buckets[i], &slots[slot], if i == first { caps.first_bytes } else { caps.bytes }) =>
                    {
                        buckets[i].slots.push(slot);
                        buckets[i].len_elems += slots[slot].len_elems();
                    }
                    _ => {
                        buckets.push(Bucket {
                            dtype: slots[slot].dtype,
                            slots: vec![slot],
                            len_elems: slots[slot].len_elems(),
                            has_wake_flag: false,
                            has_sharded_flag: false,
                            has_stop_flag: false,
                            dormant,
                            packed,
                        });
                    }
                }
            }
            if !dormant && buckets.is_empty() {
                // Nothing is trainable yet: an empty bucket still carries the wake flag.
                buckets.push(Bucket {
                    dtype: DType::F32,
                    slots: vec![],
                    len_elems: 0,
                    has_wake_flag: true,
                    has_sharded_flag: false,
                    has_stop_flag: false,
                    dormant: false,
                    packed,
                });
            }
        }
        let awake = buckets.iter().filter(|b| !b.dormant).count();
        buckets[awake - 1].has_wake_flag |= awake < buckets.len();
        buckets[awake - 1].has_stop_flag = true;
        buckets[awake - 1].has_sharded_flag = slots.iter().any(|slot| slot.sharded);
        let mut ranges = vec![BucketRange { bucket: 0, nth: 0, start: 0, len: 0 }; slots.len()];
        for (bucket, b) in buckets.iter().enumerate() {
            let mut start = 0;
            for (nth, &slot) in b.slots.iter().enumerate() {
                let len = slots[slot].len_bytes();
                ranges[slot] = BucketRange { bucket, nth, start, len };
                start += len;
            }
        }
        Plan { buckets, ranges, awake }
    }
}

fn fits(bucket: &Bucket, slot: &Slot, cap_bytes: usize) -> bool {
    bucket.len_elems * bucket.dtype.size_bytes() + slot.len_bytes() <= cap_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slot(path: &str, n: usize, dtype: DType, trainable: bool) -> Slot {
        Slot { path: path.into(), dims: vec![n], dtype, trainable, sharded: false }
    }

    const CAPS: Caps = Caps { first_bytes: 40, bytes: 100 };

    #[test]
    fn reverse_order_small_first_bucket_cap() {
        let slots: Vec<_> = (0..6).map(|i| slot(&i.to_string(), 10, DType::F32, true)).collect();
        let plan = Plan::new(&slots, &[], CAPS, true);
        let cut: Vec<_> = plan.buckets.iter().map(|b| b.slots.clone()).collect();
        assert_eq!(cut, [vec![5], vec![4, 3], vec![2, 1], vec![0]]);
        assert_eq!(plan.ranges[3], BucketRange { bucket: 1, nth: 1, start: 40, len: 40 });
        assert_eq!(plan.buckets[0].total_elems(), 11);
        assert_eq!(plan.buckets[1].total_elems(), 22);
    }

    #[test]
    fn a_parameter_larger_than_the_cap_has_a_bucket_of_its_own() {
        let slots =
            [slot("a", 1, DType::F32, true), slot("big", 1000, DType::F32, true), slot("c", 1, DType::F32, true)];
        let plan = Plan::new(&slots, &[0, 1, 2], CAPS, true);
        assert_eq!(plan.buckets.iter().map(|b| b.slots.clone()).collect::<Vec<_>>(), [vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn dtypes_never_share_a_bucket_and_alternating_dtypes_do_not_shatter() {
        let slots: Vec<_> =
            (0..8).map(|i| slot("", 2, if i % 2 == 0 { DType::F32 } else { DType::F64 }, true)).collect();
        let plan = Plan::new(&slots, &[], CAPS, true);
        assert_eq!(
            plan.buckets.iter().map(|b| b.slots.clone()).collect::<Vec<_>>(),
            [vec![7, 5], vec![6, 4, 2, 0], vec![3, 1]]
        );
        assert!(plan.buckets.iter().all(|b| b.slots.iter().all(|&s| slots[s].dtype == b.dtype)));
    }

    #[test]
    fn what_stays_on_its_device_is_cut_alike_and_has_flags_only() {
        let slots: Vec<_> = (0..6).map(|i| slot(&i.to_string(), 10, DType::F32, i > 0)).collect();
        let (host, device) = (Plan::new(&slots, &[], CAPS, true), Plan::new(&slots, &[], CAPS, false));
        assert_eq!((host.awake, &host.ranges), (device.awake, &device.ranges));
        for (host, device) in host.buckets.iter().zip(&device.buckets) {
            assert_eq!(
                (&host.slots, host.len_elems, host.reduced_bytes()),
                (&device.slots, device.len_elems, device.reduced_bytes())
            );
            assert_eq!(device.total_elems(), host.total_elems() - host.len_elems);
            assert_eq!(device.flag_elem(0), 0);
            assert_eq!(device.wake_elem().is_some(), host.wake_elem().is_some());
        }
    }

    #[test]
    fn frozen_parameters_sleep_in_buckets_of_their_own() {
        let slots = [slot("a", 4, DType::F32, true), slot("frozen", 4, DType::F32, false)];
        let plan = Plan::new(&slots, &[], CAPS, true);
        assert_eq!(plan.awake, 1);
        assert!(plan.buckets[1].dormant && plan.buckets[1].slots == [1]);
        let all_frozen = Plan::new(&[slot("frozen", 4, DType::F32, false)], &[], CAPS, true);
        // The wake flag and the stop flag.
        assert_eq!((all_frozen.awake, all_frozen.buckets[0].total_elems()), (1, 2));
    }

    proptest! {
        #[test]
        fn every_slot_has_exactly_one_range_and_no_two_overlap(
            sizes in prop::collection::vec((0usize..50, 0u8..3, any::<bool>()), 0..40),
            order in prop::collection::vec(0usize..40, 0..60),
        ) {
            let dtypes = [DType::F32, DType::F64, DType::F16];
            let slots: Vec<_> = sizes.iter().map(|&(n, d, t)| slot("", n, dtypes[d as usize], t)).collect();
            let plan = Plan::new(&slots, &order, CAPS, true);
            prop_assert_eq!(plan.buckets.iter().map(|b| b.slots.len()).sum::<usize>(), slots.len());
            for (s, range) in plan.ranges.iter().enumerate() {
                let bucket = &plan.buckets[range.bucket];
                prop_assert_eq!(bucket.slots[range.nth], s);
                prop_assert_eq!(bucket.dtype, slots[s].dtype);
                prop_assert_eq!(bucket.dormant, !slots[s].trainable);
                let before: usize = bucket.slots[..range.nth].iter().map(|&o| slots[o].len_bytes()).sum();
                prop_assert_eq!(range.bytes(), before..before + slots[s].len_bytes());
            }
            for (i, b) in plan.buckets.iter().enumerate() {
                prop_assert!(!b.has_wake_flag || i + 1 == plan.awake);
                prop_assert_eq!(b.stop_elem().is_some(), i + 1 == plan.awake);
                let of_slots = (0..b.slots.len()).map(|nth| b.flag_elem(nth));
                let flags = of_slots.chain(b.wake_elem()).chain(b.sharded_elem()).chain(b.stop_elem());
                prop_assert!(flags.eq(b.len_elems..b.total_elems()));
                prop_assert!(b.has_wake_flag || i + 1 != plan.awake || plan.awake == plan.buckets.len());
            }
        }
    }
}
