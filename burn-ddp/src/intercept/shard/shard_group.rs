//! The collectives of the parts of one wrapped model, in one group: tagged, so that calls that do not belong together
//! are an error, and never exchange data.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use burn::tensor::{Bytes, DType as BurnDType};
use burn_ddp_comm::{
    CallInfo, DType, Error as CommError, OwnLeaves, PartReduction, ProcessGroup, ReduceOp, RowDivision, SharedBuffer,
    SharedView,
};

use super::gather_cache::GatherCache;
use crate::gradients::{DeviceLoan, GradientMemory, Slot};
use crate::telemetry::step_meter::Meter;
use crate::tensor_conversion::comm_dtype;
use crate::{Error, Result};

/// Purpose of a call. Its number is in the call's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Gathers for a forward whose backward may follow: the n-th read since the last backward.
    Forward(usize),
    /// Gathers for a forward without backward.
    Evaluation,
    /// Gathers in backward what the n-th read gathered.
    Backward(usize),
    /// Agrees on which gradients there are, before the first reduction of a backward.
    Agreement,
    /// Reduces a gradient.
    Gradient,
    /// Gathers for a file, a hash, or a model without parts.
    Whole,
    /// Sums numbers of the parts.
    Numbers,
}

/// Rule that ranks break whose calls differ.
const IN_STEP: &str = "every rank must read the same parameters of the same copies of the model in the same order, in \
    training and in evaluation, and change copies in the same order";

/// Most bytes of a parameter whose whole is made in the group's buffer. Larger ones take new memory in each call.
pub(crate) const MOST_SHARED_BYTES: usize = 48 << 20;

/// Bits of a tag after its purpose: number of the read, number of the value, slot.
const READ_BITS: u32 = 20;
const VALUE_BITS: u32 = 20;
const SLOT_BITS: u32 = 20;

/// Bits of the number of a value that count changes since the last backward.
pub(in crate::intercept) const CHANGES_BITS: u32 = 8;

/// The lowest `bits` of a number.
fn low(number: u64, bits: u32) -> u64 {
    number & ((1 << bits) - 1)
}

impl Purpose {
    /// The tag of a call for a value of a slot. `value_id` tells copies of the model apart.
    fn tag(self, slot: usize, value_id: u64) -> u64 {
        let (purpose, number) = match self {
            Purpose::Forward(number) => (1, number),
            Purpose::Evaluation => (2, 0),
            Purpose::Backward(number) => (3, number),
            Purpose::Agreement => (4, 0),
            Purpose::Gradient => (5, 0),
            Purpose::Whole => (6, 0),
            Purpose::Numbers => (7, 0),
        };
        let with_read = purpose << READ_BITS | low(number as u64, READ_BITS);
        let with_value = with_read << VALUE_BITS | low(value_id, VALUE_BITS);
        with_value << SLOT_BITS | low(slot as u64, SLOT_BITS)
    }
}

/// The call with this tag in words.
fn spoken(tag: u64, slots: &[Slot]) -> String {
    let path = slots.get(low(tag, SLOT_BITS) as usize).map_or("?", |slot| &slot.path);
    let value = low(tag >> SLOT_BITS, VALUE_BITS);
    let number = low(tag >> (SLOT_BITS + VALUE_BITS), READ_BITS);
    let copy = match value {
        0 => String::new(),
        _ => {
            let (backward, change) = (value >> CHANGES_BITS, low(value, CHANGES_BITS));
            format!(" of the copy made by change {change} of {path} after backward {backward}")
        }
    };
    match tag >> (READ_BITS + VALUE_BITS + SLOT_BITS) {
        1 => format!("reads {path}{copy} in a forward (read {number} since the last backward)"),
        2 => format!("reads {path}{copy} without a gradient (evaluation)"),
        3 => format!("needs {path}{copy} in backward, for read {number}"),
        4 => "begins to reduce the gradients of a backward".into(),
        5 => format!("reduces the gradient of {path}"),
        6 => format!("makes {path}{copy} whole (save, hash or unwrap)"),
        7 => "computes the norm of the gradients".into(),
        _ => "makes another call".into(),
    }
}

/// The mean by `weights` or, without them, the sum.
fn reduction_of(weights: Option<&[f64]>) -> PartReduction {
    weights.map_or(PartReduction::Op(ReduceOp::Sum), |weights| PartReduction::Weighted(weights.to_vec()))
}

/// The group of one wrapped model in which parts become wholes, and gradients become averages of parts.
pub(crate) struct ShardGroup {
    /// `None` once no copy of the model is left.
    group: RwLock<Option<Arc<ProcessGroup>>>,
    /// The group's number, the world ranks in it, and this rank's place among them.
    id: u64,
    ranks: Vec<usize>,
    rank: usize,
    slots: Arc<[Slot]>,
    /// Reads since the last backward.
    reads: AtomicUsize,
    /// Reads of each slot since the last agreement.
    reads_to_compare: Box<[AtomicUsize]>,
    /// Locked by reads, for a moment, and when a call ends.
    held: Mutex<GatherCache>,
    /// Number of the device in whose memory parameters become whole, and gradients are reduced; `None` if all that is
    /// done in the memory of the host, as it is for copies of the model on other devices.
    engine_device: Option<usize>,
    /// Longest time for which a device may not answer.
    patience: Duration,
    /// Memory of the host in which parameters become whole, and gradients are reduced, unless they do on their device.
    buffer: Mutex<SharedBuffer>,
    meter: Meter,
}

impl ShardGroup {
    /// *Collective*.
    pub(crate) fn new(
        group: ProcessGroup,
        slots: Arc<[Slot]>,
        meter: Meter,
        (engine_device, patience): (Option<usize>, Duration),
    ) -> Result<Self> {
        group.hide_from_timeline();
        let of_tags = slots.clone();
        group.explain_tags(move |tag| Some(spoken(tag, &of_tags)));
        let sharded = slots.iter().map(|slot| if slot.sharded { slot.len_bytes() } else { 0 });
        let held = Mutex::new(GatherCache::new(sharded.clone()));
        let largest = sharded.filter(|bytes| *bytes <= MOST_SHARED_BYTES).max().unwrap_or(0);
        let largest = if engine_device.is_some() { 0 } else { largest };
        let buffer = Mutex::new(group.shared_buffers(&[largest])?.remove(0));
        let reads_to_compare = slots.iter().map(|_| AtomicUsize::new(0)).collect();
        let reads = AtomicUsize::new(0);
        let (id, ranks, rank) = (group.id(), group.ranks().to_vec(), group.rank());
        let group = RwLock::new(Some(Arc::new(group)));
        Ok(ShardGroup {
            group,
            id,
            ranks,
            rank,
            slots,
            reads,
            reads_to_compare,
            held,
            engine_device,
            patience,
            buffer,
            meter,
        })
    }

    /// Closes the group and frees its memory, when no copy of the model is left: graphs may keep this value for long. A
    /// call that is under way goes on.
    pub(crate) fn retire(&self) {
        let group = self.group.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(group);
        self.held().forget();
        if let Ok(mut buffer) = self.buffer.try_lock() {
            *buffer = SharedBuffer::plain(0);
        }
    }

    /// Makes a call on the group.
    fn call<R>(&self, call: impl FnOnce(&ProcessGroup) -> burn_ddp_comm::Result<R>) -> Result<R> {
        let group = self.group.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(group) = group else {
            return Err(self.fault("no copy of the wrapped model is left: keep one until its last backward".to_owned()));
        };
        call(&group).map_err(|error| self.explain(error))
    }

    /// True if the group's engine reaches the memory of `device`.
    pub(in crate::intercept) fn reach<B: GradientMemory>(&self, device: &B::Device) -> bool {
        self.engine_device.is_some_and(|ordinal| B::reaches(device, ordinal))
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// The whole parameter of a slot.
    pub(super) fn slot(&self, slot: usize) -> &Slot {
        &self.slots[slot]
    }

    /// The whole parameter of a slot with elements of another float type.
    pub(super) fn slot_as(&self, slot: usize, dtype: BurnDType) -> Slot {
        let s = self.slots[slot].clone();
        Slot { dtype: comm_dtype(dtype).unwrap_or(s.dtype), ..s }
    }

    /// Division of a slot.
    pub(crate) fn rows(&self, slot: usize) -> RowDivision {
        self.rows_of(&self.slots[slot])
    }

    fn rows_of(&self, s: &Slot) -> RowDivision {
        RowDivision { rows: s.dims[0], row_bytes: s.len_bytes() / s.dims[0], world_size: self.ranks.len() }
    }

    /// Shape of this rank's part of a slot.
    pub(crate) fn part_dims(&self, slot: usize) -> Vec<usize> {
        let mut dims = self.slots[slot].dims.clone();
        dims[0] = self.rows(slot).rows_of(self.rank()).len();
        dims
    }

    /// Number of the next read, which is of this slot.
    pub(super) fn next_read(&self, slot: usize) -> usize {
        self.reads_to_compare[slot].fetch_add(1, Ordering::AcqRel);
        self.reads.fetch_add(1, Ordering::AcqRel)
    }

    /// Begins to count reads anew, when a backward has ended.
    pub(crate) fn restart(&self) {
        self.reads.store(0, Ordering::Release);
        self.held().end_backward();
    }

    /// Lets go of wholes whose values are replaced, and begins to count reads anew.
    #[cfg(feature = "train")]
    pub(crate) fn forget_values(&self) {
        self.reads.store(0, Ordering::Release);
        self.held().forget();
    }

    /// Wholes that are held for further reads.
    pub(super) fn held(&self) -> MutexGuard<'_, GatherCache> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gathers the whole of a slot for a read, in the type of `s`: each rank passes its part of the value with the
    /// number `value_id`. While the view is held, further gathers take new memory. *Collective*.
    pub(super) fn read(
        &self,
        s: &Slot,
        (slot, value_id): (usize, u64),
        part: &[u8],
        purpose: Purpose,
    ) -> Result<SharedView> {
        let (division, dtype, tag) = (self.rows_of(s), s.dtype, purpose.tag(slot, value_id));
        self.check_part(slot, part.len(), division)?;
        let whole = self.in_buffer(division.len_bytes(), |buffer| {
            self.call(|group| group.all_gather_parts_shared(dtype, division, part, buffer, tag))
        })?;
        self.meter.gathered(whole.len());
        Ok(whole)
    }

    /// Gathers the whole of a slot into memory of its own. *Collective*.
    pub(super) fn gather(&self, slot: usize, value_id: u64, part: &[u8], purpose: Purpose) -> Result<Bytes> {
        self.gather_as((self.rows(slot), self.slots[slot].dtype), slot, value_id, part, purpose)
    }

    /// [`gather`](Self::gather) of other values of the slot (the state of an optimizer), with this division and dtype.
    /// *Collective*.
    pub(super) fn gather_as(
        &self,
        (division, dtype): (RowDivision, DType),
        slot: usize,
        value_id: u64,
        part: &[u8],
        purpose: Purpose,
    ) -> Result<Bytes> {
        self.check_part(slot, part.len(), division)?;
        let tag = purpose.tag(slot, value_id);
        let gather = |whole: &mut [u8]| {
            self.call(|group| group.all_gather_parts(dtype, division, part, whole, tag))?;
            self.meter.gathered(whole.len());
            Ok(())
        };
        filled(dtype.size_bytes(), division.len_bytes(), gather)
    }

    /// Gathers the whole of a slot on its device, like [`read`](Self::read): the loan is of this rank's part.
    /// *Collective* unless the device fails.
    pub(super) fn read_on_device(
        &self,
        s: &Slot,
        (slot, value_id): (usize, u64),
        loan: &mut dyn DeviceLoan,
        purpose: Purpose,
    ) -> Result<()> {
        let (division, dtype, tag) = (self.rows_of(s), s.dtype, purpose.tag(slot, value_id));
        self.check_part(slot, loan.len_elems() * dtype.size_bytes(), division)?;
        let place = self.place(slot, loan)?;
        self.call(|group| group.all_gather_parts_on_device(dtype, division, place, tag))?;
        self.meter.gathered(division.len_bytes());
        Ok(())
    }

    /// The place of a loan, for the engine.
    fn place<'a>(&self, slot: usize, loan: &'a mut dyn DeviceLoan) -> Result<&'a mut dyn Any> {
        let path = &self.slots[slot].path;
        loan.place(self.patience).map_err(|e| self.fault(format!("{path} was not lent on its device: {e}")))
    }

    /// Fails unless this rank's part has `len_bytes`.
    fn check_part(&self, slot: usize, len_bytes: usize, division: RowDivision) -> Result<()> {
        let expected = division.bytes_of(self.rank()).len();
        if len_bytes == expected {
            return Ok(());
        }
        let path = &self.slots[slot].path;
        Err(self.fault(format!(
            "this rank's part of {path} has {len_bytes} bytes, but {expected} since `wrap`: the parameter was \
            replaced, for example by a record, or an optimizer's step changed its shape"
        )))
    }

    /// Runs `call` with a buffer of `len_bytes`.
    fn in_buffer<R>(&self, len_bytes: usize, call: impl FnOnce(&mut SharedBuffer) -> Result<R>) -> Result<R> {
        if len_bytes > MOST_SHARED_BYTES {
            return call(&mut SharedBuffer::plain(len_bytes));
        }
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        buffer.set_len(len_bytes);
        call(&mut buffer)
    }

    /// The numbers of each rank, equally many each. *Collective*.
    ///
    /// # Errors
    ///
    /// On every rank, if the ranks have read a parameter in different numbers since the last agreement: reads of held
    /// values are no collectives, so nothing else compares them.
    pub(super) fn agree(&self, own: &[i64]) -> Result<Vec<Vec<i64>>> {
        let reads = self.reads_to_compare.iter().map(|reads| reads.swap(0, Ordering::AcqRel) as i64);
        let numbers: Vec<i64> = own.iter().copied().chain(reads).collect();
        let mut all = vec![0; numbers.len() * self.ranks.len()];
        let (part, rows) = (bytemuck::cast_slice(&numbers), bytemuck::cast_slice_mut(&mut all));
        let tag = Purpose::Agreement.tag(0, 0);
        self.call(|group| group.all_gather_tagged(DType::I64, part, rows, tag))?;
        let (numbers, reads): (Vec<_>, Vec<_>) =
            all.chunks_exact(numbers.len()).map(|of_rank| of_rank.split_at(own.len())).unzip();
        self.compare_reads(&reads)?;
        Ok(numbers.into_iter().map(<[i64]>::to_vec).collect())
    }

    /// Fails if the ranks of the group have read a slot in different numbers. The error is about the last rank of those
    /// whose number is the rarest.
    fn compare_reads(&self, reads: &[&[i64]]) -> Result<()> {
        let differ = |slot: &usize| reads.iter().any(|of_rank| of_rank[*slot] != reads[0][*slot]);
        let Some(slot) = (0..self.slots.len()).find(differ) else { return Ok(()) };
        let alike = |nth: &usize| reads.iter().filter(|of_rank| of_rank[slot] == reads[*nth][slot]).count();
        let odd = (0..reads.len()).rev().min_by_key(alike).unwrap_or_default();
        let other = (0..reads.len()).find(|nth| reads[*nth][slot] != reads[odd][slot]).unwrap_or_default();
        let ([rank, another], path) = ([odd, other].map(|nth| self.ranks[nth]), &self.slots[slot].path);
        let reason = format!(
            "rank {another} has read {path} {} times since the last reduction, but rank {rank} {} times: {IN_STEP}",
            reads[other][slot], reads[odd][slot]
        );
        Err(Error::Sharding { rank, reason })
    }

    /// Numbers that every rank passes, in the order of ranks: equally many each. *Collective*.
    pub(in crate::intercept) fn numbers(&self, own: &[f64]) -> Result<Vec<f64>> {
        let mut all = vec![0.0; own.len() * self.ranks.len()];
        let (own, rows) = (bytemuck::cast_slice(own), bytemuck::cast_slice_mut(&mut all));
        self.call(|group| group.all_gather_tagged(DType::F64, own, rows, Purpose::Numbers.tag(0, 0)))?;
        Ok(all)
    }

    /// Fails like a mean in which all weights are 0, alike on all ranks. *Collective*.
    pub(super) fn refuse_weights_of_zero(&self) -> Result<()> {
        let tag = Purpose::Agreement.tag(1, 0);
        self.call(|group| group.all_reduce_weighted_bytes(DType::F32, &mut [0; 4], 0.0, tag))
    }

    /// Reduces the gradient of a slot, which `write` writes in the type of `s`, over the ranks: to the mean by
    /// `weights` (one for each rank) or, without them, to the sum. Returns this rank's rows. *Collective* unless
    /// `write` fails.
    pub(super) fn reduce(
        &self,
        (slot, s): (usize, &Slot),
        weights: Option<&[f64]>,
        write: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Vec<u8>> {
        let (division, dtype, tag) = (self.rows_of(s), s.dtype, Purpose::Gradient.tag(slot, 0));
        let reduction = reduction_of(weights);
        self.in_buffer(division.len_bytes(), |buffer| {
            write(buffer.bytes_mut())?;
            self.meter.reduced(buffer.len_bytes());
            self.call(|group| group.reduce_scatter_parts_shared(dtype, division, buffer, &reduction, tag))
        })
    }

    /// Reduces sums of leaves of a slot over the ranks, and returns this rank's rows of their mean, in the type in
    /// which they are added: `write` writes one whole tensor for each row of leaves. *Collective* unless it fails.
    pub(super) fn reduce_leaves(
        &self,
        slot: usize,
        own: OwnLeaves<'_>,
        write: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Vec<u8>> {
        let (s, tag) = (self.slots[slot].widened(), Purpose::Gradient.tag(slot, 0));
        let division = self.rows_of(&s);
        self.in_buffer(division.len_bytes() * own.division.rows(), |buffer| {
            let bytes = buffer.bytes_mut();
            write(bytes)?;
            self.meter.reduced(bytes.len());
            self.call(|group| group.reduce_scatter_leaves(s.dtype, division, bytes, own, tag))
        })
    }

    /// Reduces the gradient of a slot on its device, like [`reduce`](Self::reduce): the loan is of the whole, and of
    /// zeros if this rank has the weight 0. *Collective* unless the device fails.
    pub(super) fn reduce_on_device(
        &self,
        (slot, s): (usize, &Slot),
        weights: Option<&[f64]>,
        loan: &mut dyn DeviceLoan,
    ) -> Result<()> {
        let (division, dtype, tag) = (self.rows_of(s), s.dtype, Purpose::Gradient.tag(slot, 0));
        let (place, reduction) = (self.place(slot, loan)?, reduction_of(weights));
        self.meter.reduced(division.len_bytes());
        self.call(|group| group.reduce_scatter_parts_on_device(dtype, division, place, &reduction, tag))
    }

    /// An error that names this rank.
    pub(super) fn fault(&self, reason: String) -> Error {
        Error::Sharding { rank: self.ranks[self.rank], reason }
    }

    /// The error of a collective, with parameters named where ranks made different calls.
    fn explain(&self, error: CommError) -> Error {
        let is_ours = |call: &CallInfo| call.group == self.id;
        let calls: Vec<(usize, &CallInfo)> = match &error {
            CommError::Mismatch { first, second } => vec![(first.rank, &first.call), (second.rank, &second.call)],
            CommError::Timeout { reporter, call, .. } => vec![(*reporter, call)],
            // The text of a deadlock contains what the ranks do: ranks in calls of other groups get it, too.
            CommError::Deadlock { calls } if calls.iter().any(|stuck| is_ours(&stuck.call)) => {
                let rank = error.rank().unwrap_or_else(|| self.rank());
                return Error::Sharding { rank, reason: format!("{error}; {IN_STEP}") };
            }
            _ => Vec::new(),
        };
        let Some(rank) = calls.iter().filter(|(_, call)| is_ours(call)).map(|(rank, _)| *rank).min() else {
            return error.into();
        };
        let say = |(rank, call): &(usize, &CallInfo)| format!("rank {rank} {}", spoken(call.tag, &self.slots));
        let does: Vec<String> = calls.iter().map(say).collect();
        Error::Sharding { rank, reason: format!("{}: {IN_STEP} ({error})", does.join(", but ")) }
    }
}

/// `len_bytes` bytes that `fill` writes, aligned for elements of `elem_bytes`: Burn would copy a `Vec<u8>`.
pub(super) fn filled(elem_bytes: usize, len_bytes: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Bytes> {
    fn of<E: bytemuck::Pod + Send + Sync>(len: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Bytes> {
        let mut elems = vec![E::zeroed(); len / size_of::<E>()];
        fill(bytemuck::cast_slice_mut(&mut elems))?;
        Ok(Bytes::from_elems(elems))
    }
    match elem_bytes {
        2 => of::<u16>(len_bytes, fill),
        4 => of::<u32>(len_bytes, fill),
        _ => of::<u64>(len_bytes, fill),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_a_call_in_words() {
        let slot = |path: &str| Slot {
            path: path.into(),
            dims: vec![2, 2],
            dtype: DType::F32,
            trainable: true,
            sharded: true,
        };
        let slots = [slot("a"), slot("b")];
        for (purpose, says) in [
            (Purpose::Forward(7), "reads b in a forward (read 7 since the last backward)"),
            (Purpose::Evaluation, "reads b without a gradient (evaluation)"),
            (Purpose::Backward(9), "needs b in backward, for read 9"),
            (Purpose::Gradient, "reduces the gradient of b"),
            (Purpose::Whole, "makes b whole (save, hash or unwrap)"),
        ] {
            assert_eq!(spoken(purpose.tag(1, 0), &slots), says);
            assert_ne!(purpose.tag(0, 0), purpose.tag(1, 0));
        }
        let of_copy = spoken(Purpose::Evaluation.tag(1, 17 << CHANGES_BITS | 2), &slots);
        assert_eq!(
            of_copy,
            "reads b of the copy made by change 2 of b after backward 17 without a gradient (evaluation)"
        );
    }
}
