//! Gradients of sharded parameters: summed over reads and micro-batches, then reduced to the average of a part.
//!
//! Each reduction is a collective of its own, so all ranks must make the same ones in the same order. A rank alone
//! cannot tell when a gradient is complete: a read (`Param::val`) whose forward was dropped counts as outstanding
//! until Burn sweeps its graph, and when Burn does so depends on other threads. Before the first reduction of a
//! backward the ranks agree, once, on the reads to wait for and on the parameters that have a gradient.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, TensorData};

use burn_ddp_comm::OwnLeaves;

use super::device_call::on_device;
use super::shard_group::ShardGroup;
use crate::gradients::{
    Contribution, DeviceLoan, FirstNotFinite, GradientMemory, MicroBatch, Nodes, ReducerSettings, Rows, Slot, Sum,
    is_finite, pack,
};
use crate::tensor_conversion::{burn_dtype, cast, comm_dtype};
use crate::{Error, Result};

/// Gradients of the sharded parameters of one wrapped model on backend `B`.
pub(in crate::intercept) struct ShardedGradients<B: Backend> {
    slots: Vec<State<B>>,
    settings: ReducerSettings,
    /// With logical ranks.
    rows: Option<Rows>,
    /// As far as reading gradients has shown.
    not_finite: FirstNotFinite,
    /// Agreement of the ranks for the running backward, if it reduces and has reached a sharded parameter.
    agreement: Option<Agreement>,
}

/// Agreement of the ranks before the first reduction of a backward.
struct Agreement {
    /// True if all ranks have the weight 0: nothing is reduced, and the step fails once no collective is under way.
    is_weightless: bool,
    /// The ranks' weights, unless the reduction is a sum.
    weights: Option<Vec<f64>>,
    /// True if this backward adds to the gradients of some rank: those of weight 0 do not.
    contributes: bool,
    /// Reads of each slot whose hooks may run in this backward: the largest number of any rank.
    reads: Vec<i64>,
    /// True for each slot of which some rank holds a sum of earlier micro-batches.
    held: Vec<bool>,
}

struct State<B: Backend> {
    /// Sums over micro-batches, of the whole parameter.
    held: Nodes<Sum>,
    /// Number of hooks that have run in the current backward.
    hooks: i64,
    /// Average of this rank's part.
    average: Option<FloatTensor<B>>,
}

impl<B: GradientMemory> ShardedGradients<B> {
    pub(in crate::intercept) fn new(slots: usize, settings: ReducerSettings) -> Self {
        let state = |_| State { held: Nodes::default(), hooks: 0, average: None };
        ShardedGradients {
            slots: (0..slots).map(state).collect(),
            settings,
            rows: settings.tree().map(Rows::new),
            not_finite: FirstNotFinite::default(),
            agreement: None,
        }
    }

    /// Agrees with the other ranks on the gradients of this backward, which reduces, unless it has done so already.
    /// `outstanding` counts the reads of each slot whose hooks may still run. *Collective*.
    pub(in crate::intercept) fn agree(
        &mut self,
        shards: &ShardGroup,
        outstanding: &[i64],
        micro_batch: &MicroBatch,
    ) -> Result<()> {
        if self.agreement.is_some() {
            return Ok(());
        }
        let n = self.slots.len();
        let contributes = micro_batch.contribution != Contribution::Ignored;
        let mut own = vec![micro_batch.weight_of_mean.unwrap_or(1.0).to_bits() as i64, i64::from(contributes)];
        own.extend(outstanding);
        own.extend(self.slots.iter().map(|state| i64::from(!state.held.is_empty())));
        let ranks = shards.agree(&own)?;
        let most = |column: usize| ranks.iter().map(|of_rank| of_rank[column]).max().unwrap_or_default();
        let weights: Vec<f64> = ranks.iter().map(|of_rank| f64::from_bits(of_rank[0] as u64)).collect();
        self.agreement = Some(Agreement {
            is_weightless: weights.iter().all(|weight| *weight <= 0.0),
            weights: micro_batch.weight_of_mean.map(|_| weights),
            contributes: most(1) > 0,
            reads: (0..n).map(|slot| most(2 + slot)).collect(),
            held: (0..n).map(|slot| most(2 + n + slot) > 0).collect(),
        });
        Ok(())
    }

    /// Counts a hook of a slot. Returns true if no other hook of the slot follows in this backward, on any rank; false
    /// before the ranks have agreed, as in a backward that does not reduce.
    pub(in crate::intercept) fn is_last_hook(&mut self, slot: usize) -> bool {
        self.slots[slot].hooks += 1;
        self.agreement.as_ref().is_some_and(|agreed| self.slots[slot].hooks >= agreed.reads[slot])
    }

    /// Fails like a mean in which all weights are 0, if all are. *Collective*.
    pub(in crate::intercept) fn refuse_weightless(&self, shards: &ShardGroup) -> Result<()> {
        match &self.agreement {
            Some(Agreement { is_weightless: true, .. }) => shards.refuse_weights_of_zero(),
            _ => Ok(()),
        }
    }

    /// True if a sum of earlier micro-batches must be reduced, which this rank or another one holds.
    pub(in crate::intercept) fn must_reduce(&self, slot: usize) -> bool {
        self.agreement.as_ref().is_some_and(|agreed| agreed.held[slot])
    }

    /// Takes the gradient of a slot in this backward. *Collective* if the backward reduces.
    pub(in crate::intercept) fn put(
        &mut self,
        shards: &ShardGroup,
        slot: usize,
        gradient: FloatTensor<B>,
        micro_batch: MicroBatch,
    ) -> Result<()> {
        let s = shards.slot(slot);
        let (device, shape, dtype) = (gradient.device(), gradient.shape(), gradient.dtype());
        if shape.to_vec() != s.dims || comm_dtype(dtype) != Some(s.dtype) {
            let (path, dims, expected) = (&s.path, &s.dims, s.dtype);
            return Err(shards.fault(format!(
                "the gradient of {path} is {:?} {dtype:?}, and not {dims:?} {expected}",
                shape.to_vec()
            )));
        }
        let state = &mut self.slots[slot];
        let mut whole = None;
        match micro_batch.contribution {
            Contribution::Ignored => {}
            Contribution::Whole { leaf } => whole = Some((gradient, leaf)),
            Contribution::Added { weight, leaf } => {
                let run = self.rows.as_ref().map(|rows| rows.run);
                let added = B::with_bytes(gradient, |_, bytes| {
                    state.held.add(run, (leaf, weight), s.dtype, bytes);
                    is_finite(s.dtype, bytes)
                });
                let is_finite = added.map_err(|reason| unreadable(shards, slot, &reason))?;
                self.not_finite.note_unless(is_finite, slot, leaf);
            }
        }
        match micro_batch.reducing {
            true => self.reduce(shards, slot, whole, &micro_batch, &device),
            false => Ok(()),
        }
    }

    /// Reduces the gradient of a slot: `whole`, of a leaf, or what is held of earlier micro-batches. If no rank has
    /// one, the slot has no average. *Collective*.
    pub(in crate::intercept) fn reduce(
        &mut self,
        shards: &ShardGroup,
        slot: usize,
        whole: Option<(FloatTensor<B>, usize)>,
        micro_batch: &MicroBatch,
        device: &B::Device,
    ) -> Result<()> {
        let s = shards.slot(slot);
        let Some(agreed) = &self.agreement else {
            return Err(shards
                .fault(format!("the gradient of {} came before the ranks agreed which gradients to reduce", s.path)));
        };
        let state = &mut self.slots[slot];
        if agreed.is_weightless || !agreed.contributes && !agreed.held[slot] {
            return Ok(());
        }
        if let Some(rows) = &self.rows {
            let (held, weights) = (std::mem::take(&mut state.held), micro_batch.weights_of_rows(rows));
            let own = OwnLeaves { division: rows.run.division, weights: &weights };
            let wide = self.settings.sent(s);
            let not_finite = &mut self.not_finite;
            let part = shards.reduce_leaves(slot, own, |out| {
                Rows::clear(wide.dtype, out);
                if let Some((whole, leaf)) = whole {
                    let packed = B::with_bytes(whole, |_, bytes| pack(s.dtype, bytes, wide.dtype, out));
                    let is_finite = packed.map_err(|reason| unreadable(shards, slot, &reason))?;
                    not_finite.note_unless(is_finite, slot, leaf);
                    return Ok(());
                }
                for (leaf, sum) in held.fold(Some(rows.run), Sum::plus) {
                    let row = rows.of_leaf(leaf) * wide.len_bytes();
                    sum.write(wide.dtype, 1.0, &mut out[row..row + wide.len_bytes()]);
                }
                Ok(())
            })?;
            state.average = Some(average_of_part::<B>(shards, slot, part, &wide, device));
            return Ok(());
        }
        let (divisor, sent) = (micro_batch.divisor, self.settings.sent(s));
        // Without logical ranks there is one sum.
        let held = match whole {
            Some(_) => None,
            None => std::mem::take(&mut state.held).fold(None, Sum::plus).pop().map(|(_, sum)| sum),
        };
        if shards.reach::<B>(device) {
            let is_absent = agreed.weights.as_ref().is_some_and(|weights| weights[shards.rank()] == 0.0);
            let whole = match (is_absent, whole, held) {
                (false, Some((whole, _)), _) => whole,
                (false, None, Some(sum)) => {
                    let mut bytes = vec![0; s.len_bytes()];
                    sum.write(s.dtype, divisor, &mut bytes);
                    let data = TensorData::from_bytes_vec(bytes, s.dims.clone(), burn_dtype(s.dtype));
                    B::float_from_data(data, device)
                }
                _ => B::float_zeros(s.dims.clone().into(), device, burn_dtype(s.dtype).into()),
            };
            let average = reduced_on_device::<B>(shards, (slot, &sent), agreed.weights.as_deref(), whole)?;
            state.average = Some(average);
            return Ok(());
        }
        let not_finite = &mut self.not_finite;
        let part = shards.reduce((slot, &sent), agreed.weights.as_deref(), |out| {
            if let Some((whole, leaf)) = whole {
                let packed = B::with_bytes(whole, |_, bytes| pack(s.dtype, bytes, sent.dtype, out));
                let is_finite = packed.map_err(|reason| unreadable(shards, slot, &reason))?;
                not_finite.note_unless(is_finite, slot, leaf);
                return Ok(());
            }
            match held {
                Some(sum) => {
                    sum.write(sent.dtype, divisor, out);
                    not_finite.note_unless(is_finite(sent.dtype, out), slot, 0);
                }
                None => out.fill(0),
            }
            Ok(())
        })?;
        state.average = Some(average_of_part::<B>(shards, slot, part, &sent, device));
        Ok(())
    }

    /// First leaves of the sums that are held for a slot.
    pub(in crate::intercept) fn held_leaves(&self, slot: usize) -> Vec<usize> {
        self.slots[slot].held.leaves()
    }

    /// The sum that is held for a slot from a leaf on, if this rank has one.
    pub(in crate::intercept) fn held_sum(&self, slot: usize, leaf: usize) -> Option<&Sum> {
        self.slots[slot].held.sum(leaf)
    }

    /// Adds to the sum that is held for a slot from a leaf on.
    pub(in crate::intercept) fn add_held_sum(&mut self, slot: usize, leaf: usize, sum: Sum) {
        self.slots[slot].held.add_sum(leaf, sum);
    }

    /// The first gradient that is not finite, once.
    pub(in crate::intercept) fn take_not_finite(&mut self) -> FirstNotFinite {
        std::mem::take(&mut self.not_finite)
    }

    /// The averages of this backward, by slot.
    pub(in crate::intercept) fn averages(&self) -> impl Iterator<Item = (usize, FloatTensor<B>)> {
        self.slots.iter().enumerate().filter_map(|(slot, state)| Some((slot, state.average.clone()?)))
    }

    /// The average of a slot's part, once.
    pub(in crate::intercept) fn take(&mut self, slot: usize) -> Option<FloatTensor<B>> {
        self.slots[slot].average.take()
    }

    /// Ends a backward.
    pub(in crate::intercept) fn end_backward(&mut self) {
        self.agreement = None;
        for state in &mut self.slots {
            state.hooks = 0;
            state.average = None;
        }
    }

    /// Drops gradients that were not reduced.
    pub(in crate::intercept) fn clear(&mut self) {
        self.end_backward();
        self.not_finite = FirstNotFinite::default();
        self.slots.iter_mut().for_each(|state| state.held = Nodes::default());
    }
}

/// This rank's part of the average of `whole`, all on the device.
fn reduced_on_device<B: GradientMemory>(
    shards: &ShardGroup,
    (slot, sent): (usize, &Slot),
    weights: Option<&[f64]>,
    whole: FloatTensor<B>,
) -> Result<FloatTensor<B>> {
    let whole = cast::<B>(whole, burn_dtype(sent.dtype));
    let reduce = |loan: &mut dyn DeviceLoan| shards.reduce_on_device((slot, sent), weights, loan);
    let part = on_device::<B>(whole, Shape::from(shards.part_dims(slot)), reduce, |e| {
        shards.fault(format!("reducing the gradient of {} on its device failed: {e}", shards.slot(slot).path))
    })?;
    Ok(cast::<B>(part, burn_dtype(shards.slot(slot).dtype)))
}

/// The average of this rank's part from its bytes in the type of `sent`, in the type of the parameter.
fn average_of_part<B: GradientMemory>(
    shards: &ShardGroup,
    slot: usize,
    part: Vec<u8>,
    sent: &Slot,
    device: &B::Device,
) -> FloatTensor<B> {
    let data = TensorData::from_bytes_vec(part, shards.part_dims(slot), burn_dtype(sent.dtype));
    cast::<B>(B::float_from_data(data, device), burn_dtype(shards.slot(slot).dtype))
}

/// The error of a gradient that its device does not yield.
fn unreadable(shards: &ShardGroup, slot: usize, reason: &str) -> Error {
    shards.fault(format!("reading the gradient of {}: {reason}", shards.slot(slot).path))
}
