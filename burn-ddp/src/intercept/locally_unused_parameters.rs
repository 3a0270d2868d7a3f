//! Parameters that other ranks used and this one did not: this rank's backward has no leaf for their averages.
//!
//! The last gate registers such an average on the leaf of a clone (`tied_clones`) or on a stand-in leaf. As long as the
//! `Gradients` are there, [`Handoff`] shows stand-in leaves to visitors, so that `GradientsParams::from_grads` finds
//! them; `Ddp::backward`, which knows the model, moves them to the leaves of its parameters.

use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Dispatch;
use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Shape, Tensor};

use super::absent_gradients::{STEPS, Suspects};
use super::autodiff_nodes::DdpBackend;
use super::average_for_visitors::show;
use super::hook_depth::AutodiffTensor;
use super::model_state::State;
use super::unused_parameter_averages::{Changes, Found};
use super::wrapped_model::{TapHandle, WrappedModel};
use crate::gradients::GradientMemory;

/// Largest number of dimensions of a parameter.
pub(crate) const MAX_DIMS: usize = 8;

/// Evaluates `$run` with the number of dimensions as the constant `$d`; `$other` above [`MAX_DIMS`], which `wrap`
/// refuses.
macro_rules! with_dims {
    ($dims:expr, $d:ident => $run:expr, else $other:expr) => {
        with_dims!($dims, $d => $run, else $other, 1 2 3 4 5 6 7 8)
    };
    ($dims:expr, $d:ident => $run:expr, else $other:expr, $($n:literal)*) => {
        match $dims {
            $($n => {
                const $d: usize = $n;
                $run
            })*
            _ => $other,
        }
    };
}

impl TapHandle {
    /// The stand-in leaf of this parameter; an untracked tensor if none was needed so far.
    pub(super) fn stand_in<const D: usize>(&self) -> Tensor<D> {
        let like = Tensor::<D>::zeros([1; D], &self.model.device);
        Tensor::from_dispatch(Dispatch::stand_in(like.into_dispatch(), self.clone()))
    }

    /// True if an average of the parameter waits.
    pub(super) fn waits(&self) -> bool {
        self.find(Changes::default()) != Found::Nothing
    }

    /// The average of the parameter in a copy of the model with these changes.
    fn find(&self, changes: Changes) -> Found {
        let mut state = self.model.lock();
        let waiting = state.waiting();
        let found = self.sharing_slots().map(|slot| waiting.find(slot, changes));
        found.max_by_key(|found| *found as u8).unwrap_or(Found::Nothing)
    }

    /// Notes that the average of the parameter from the last backward is on its leaf.
    pub(super) fn note_settled(&self) {
        let mut state = self.model.lock();
        self.sharing_slots().for_each(|slot| state.waiting().settle(slot));
    }

    /// Notes that the averages of the parameter that wait are taken.
    pub(super) fn take_waiting(&self) {
        let mut state = self.model.lock();
        self.sharing_slots().for_each(|slot| state.waiting().take(slot));
    }
}

impl WrappedModel {
    /// The stand-in leaf with a key, if it has been needed.
    pub(super) fn stand_in<B: GradientMemory>(&self, key: usize) -> Option<AutodiffTensor<B>> {
        self.lock().of::<B>()?.stand_ins.leaf(key)
    }

    /// False if no average waits on a stand-in leaf.
    pub(super) fn averages_wait(&self) -> bool {
        self.averages_wait.load(Ordering::Acquire)
    }

    /// See [`WaitingAverages::mapped`](super::unused_parameter_averages::WaitingAverages::mapped).
    fn note_map_of(&self, slot: usize) -> Option<u64> {
        self.lock().waiting().mapped(slot)
    }

    /// See [`WaitingAverages::trained_on`](super::unused_parameter_averages::WaitingAverages::trained_on).
    fn note_read_after(&self, number: u64) {
        self.lock().waiting().trained_on(number);
    }

    /// Warns once if a step of this rank may have missed an average. The cause of the change is not known: it may be a
    /// step by hand that left a parameter out, or a clamp of the weights after a step that all ranks skipped.
    pub(super) fn warn_missed<B: GradientMemory>(&self, state: &mut State<B>) {
        // Also where nothing waits: this forgets deliveries whose `Gradients` are gone.
        let waiting = state.stand_ins.waiting();
        let missed = waiting.begin_backward();
        self.averages_wait.store(!waiting.is_empty(), Ordering::Release);
        let Some((slot, number)) = missed else { return };
        if !std::mem::replace(&mut state.warned_missed, true) {
            tracing::warn!(
                target: "burn_ddp::gradients",
                parameter = self.slots[slot].path,
                step = number - 1,
                rank = self.ddp.rank(),
                "the average of a parameter that this rank did not use was not taken before the model was changed; if \
                 the change was an optimizer step, the ranks train apart: read the average with \
                 `ddp.grad(&param, &grads)`, or take all of them with `GradientsParams::from_grads(grads, &model)`; if \
                 no rank has stepped, all is well"
            );
        }
    }

    /// Warns once of an average that is too old for a step.
    pub(super) fn warn_outdated(&self, slot: usize) {
        if !self.warned_outdated.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "burn_ddp::gradients",
                parameter = self.slots[slot].path,
                rank = self.ddp.rank(),
                "the average of a parameter is not used: another step or a record has changed the parameter since the \
                backward, and Burn has no gradients of values that have changed; step after each backward, or add the \
                losses up, and load records before the forward"
            );
        }
    }

    /// Warns once of an average that is taken after a mapper that was no optimizer was shown the parameter.
    pub(super) fn warn_unclear(&self, slot: usize) {
        if !self.warned_unclear.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "burn_ddp::gradients",
                parameter = self.slots[slot].path,
                rank = self.ddp.rank(),
                "the average of a parameter that this rank did not use is taken after the model was mapped; if the \
                mapper changed the parameter, Burn has no gradient of it on the ranks that used it, and the ranks \
                train apart: call `GradientsParams::from_grads` before the model is changed"
            );
        }
    }

    /// Warns on rank 0, once for each kind, of parameters that have no gradient on any rank. `present` has a flag for
    /// each slot.
    pub(super) fn warn_absent<B: GradientMemory>(&self, state: &mut State<B>, present: &[bool]) {
        let Some(suspects) = state.absent.note_step(present) else { return };
        let paths = |slots: Vec<usize>, is_suspect: &dyn Fn(usize) -> bool| -> String {
            let suspects = slots.into_iter().filter(|slot| is_suspect(*slot));
            suspects.map(|slot| self.slots[slot].path.as_str()).collect::<Vec<_>>().join(", ")
        };
        match suspects {
            Suspects::Never(slots) => {
                let parameters = paths(slots, &|slot| self.slots[slot].trainable);
                if !parameters.is_empty() && self.ddp.rank() == 0 {
                    tracing::warn!(
                        target: "burn_ddp::unused",
                        parameters,
                        "these parameters had no gradient on any rank in the first step: they are unused, or were not \
                        read through `val()`"
                    );
                }
            }
            Suspects::Lost(slots) => {
                // A parameter that is frozen or not used has as many taps as the others: one in each copy of the model.
                let taps = |slot: usize| self.taps[slot].load(Ordering::Acquire);
                let most = (0..self.slots.len()).map(taps).max().unwrap_or_default();
                let parameters = paths(slots, &|slot| taps(slot) < most);
                let is_news = !state.absent.warned_lost && self.ddp.world_size() > 1;
                if is_news && !parameters.is_empty() && self.ddp.rank() == 0 {
                    state.absent.warned_lost = true;
                    tracing::warn!(
                        target: "burn_ddp::unused",
                        parameters,
                        "these parameters, trained before, had no gradient on any rank in the last {STEPS} steps. That \
                        is right if they are frozen or not used any more. If the model still trains them, each rank \
                        steps them by its own gradient: `Param::map`, `Param::set_require_grad` or a new layer has \
                        replaced them. Map, freeze and load whole modules instead, or wrap the model again"
                    );
                }
            }
        }
    }
}

/// Hands the waiting averages of one parameter in one copy of the model to `GradientsParams::from_grads`.
#[derive(Clone, Debug)]
pub(super) struct Handoff {
    /// The parameter's id in this copy, as of `wrap` or of the last visit by [`find`](super::find).
    id: Number,
    /// Number of dimensions of the parameter.
    dims: usize,
    /// True for copies that train; `valid()` makes one that does not.
    trains: bool,
    /// 1 if a record was loaded into this copy, which may have changed the id; 2 if an average was shown under the old
    /// id since.
    loaded: Number,
    /// 1 if this copy was mapped or moved, which may give clones of a parameter leaves of their own.
    apart: Number,
    /// 1 more than the number of backwards that had ended when this copy was last mapped; 0 if it never was.
    mapped_at: Number,
    /// The same for the last map before which nothing had visited this copy since the last backward.
    mapped_unvisited_at: Number,
    /// The same for the last record that was loaded.
    loaded_at: Number,
    /// The same for the last visit.
    visited_at: Number,
    /// Number of the delivery of which averages had not been taken when this copy was mapped; 0 if there is none.
    mapped_without: Number,
    /// See [`TapHandle::value_id`].
    value_id: Number,
}

impl Handoff {
    pub(super) fn new<const D: usize>(param: &Param<Tensor<D>>) -> Self {
        Handoff {
            id: Number::new(param.id.val()),
            dims: D,
            trains: true,
            loaded: Number::default(),
            apart: Number::default(),
            mapped_at: Number::default(),
            mapped_unvisited_at: Number::default(),
            loaded_at: Number::default(),
            visited_at: Number::default(),
            mapped_without: Number::default(),
            value_id: Number::default(),
        }
    }

    /// The same for a copy that trains or does not.
    pub(super) fn training(&self, trains: bool) -> Self {
        Handoff { trains, apart: Number::new(1), ..self.clone() }
    }

    /// True if clones of the parameter may have leaves of their own in this copy of the model.
    pub(super) fn is_apart(&self) -> bool {
        self.apart.get() > 0
    }

    /// Notes that this copy is mapped or moved.
    pub(super) fn note_apart(&self) {
        self.apart.set(1);
    }

    /// See [`TapHandle::value_id`].
    pub(super) fn value_id(&self) -> u64 {
        self.value_id.get()
    }

    /// Sets the parameter's id.
    pub(super) fn set_id(&self, id: u64) {
        self.id.set(id);
        self.loaded.set(0);
    }

    /// Shows `visitor` the stand-in leaf under the parameter's id, if an average waits there. Visitors cannot be told
    /// apart, so all that come between a backward and the end of its `Gradients` see it. A visitor that reads its value
    /// has taken the average.
    pub(super) fn visit(&self, tap: &TapHandle, visitor: &mut impl ModuleVisitor) {
        if !self.trains {
            return;
        }
        self.visited_at.set(tap.model.ended.load(Ordering::Acquire) + 1);
        match self.find(tap) {
            Found::Nothing => {}
            found @ (Found::Waits | Found::Unclear) => {
                if with_dims!(self.dims, D => show(self.id(), tap.stand_in::<D>(), visitor), else false) {
                    tap.take_waiting();
                    if found == Found::Unclear {
                        tap.model.warn_unclear(tap.slot);
                    }
                    if self.loaded.get() > 0 {
                        self.loaded.set(2);
                    }
                }
            }
            Found::Outdated => {
                let no_average = || Tensor::<1>::zeros([0], &tap.model.device).require_grad();
                if show(self.id(), no_average(), visitor) {
                    tap.model.warn_outdated(tap.slot);
                }
            }
        }
    }

    /// Looks up the waiting average that an optimizer may apply to this copy of the parameter.
    pub(super) fn find(&self, tap: &TapHandle) -> Found {
        if !tap.model.averages_wait() {
            return Found::Nothing;
        }
        let ended = |at: &Number| at.get().checked_sub(1);
        tap.find(Changes {
            mapped_at: ended(&self.mapped_at),
            mapped_unvisited_at: ended(&self.mapped_unvisited_at),
            loaded_at: ended(&self.loaded_at),
        })
    }

    /// Notes that this copy is mapped; `loads` is true if the mapper loads a record. If a record was loaded and then an
    /// average was shown under the old id, the next mapper is taken for the optimizer: if it has not used the average,
    /// no later step is right, and the job ends.
    pub(super) fn map(&self, tap: &TapHandle, loads: bool, mapper: &mut impl ModuleMapper) {
        self.note_apart();
        self.value_id.set(tap.model.next_value_id(tap.slot));
        self.mapped_at.set(tap.model.ended.load(Ordering::Acquire) + 1);
        if self.visited_at.get() < self.mapped_at.get() {
            self.mapped_unvisited_at.set(self.mapped_at.get());
        }
        if loads {
            self.loaded.set(1);
            self.loaded_at.set(self.mapped_at.get());
        } else if self.loaded.get() == 2 {
            self.loaded.set(0);
            if with_dims!(self.dims, D => self.missed_average::<D>(tap, mapper), else false) {
                tap.model.note_stale_id(tap.slot);
            }
        }
        if tap.model.averages_wait() {
            self.mapped_without.set(tap.model.note_map_of(tap.slot).unwrap_or(0));
        }
    }

    /// Notes that all ranks have given this copy another value, and a new leaf.
    pub(super) fn replaced(&self, tap: &TapHandle) {
        self.value_id.set(tap.model.next_value_id(tap.slot));
        self.mapped_at.set(tap.model.ended.load(Ordering::Acquire) + 1);
        self.loaded_at.set(self.mapped_at.get());
    }

    /// Notes that this copy is read for a forward.
    pub(super) fn read(&self, tap: &TapHandle) {
        let number = self.mapped_without.get();
        if number > 0 {
            self.mapped_without.set(0);
            tap.model.note_read_after(number);
        }
    }

    /// True if `mapper` is an optimizer that still has a gradient under the parameter's id: no parameter of the model
    /// has this id any more. Such an optimizer changes zeros under this id, and leaves zeros under a new id as they
    /// are.
    fn missed_average<const D: usize>(&self, tap: &TapHandle, mapper: &mut impl ModuleMapper) -> bool {
        let (shape, dtype) = tap.model.shape(tap.slot);
        let Ok(shape) = <[usize; D]>::try_from(shape) else { return false };
        let mut moved = |id: ParamId| {
            let zeros = Tensor::<D>::zeros(shape, (&tap.model.device, dtype)).require_grad();
            mapper.map_float(Param::initialized(id, zeros)).base().try_into_data().ok()
        };
        moved(self.id()) != moved(ParamId::new())
    }

    /// True if a parameter with the id of this one, and the shape that it has on this rank, requires a gradient after
    /// `mapper` has come to it; before, it does if `trains`.
    pub(super) fn trains_after(&self, tap: &TapHandle, mapper: &mut impl ModuleMapper, trains: bool) -> bool {
        let (mut shape, dtype) = tap.model.shape(tap.slot);
        if let Some(shards) = tap.model.shards().filter(|_| tap.model.is_sharded(tap.slot)) {
            shape = shards.part_dims(tap.slot);
        }
        with_dims!(self.dims, D => {
            let zeros = Tensor::<D>::zeros(Shape::from(shape), (&tap.model.device, dtype)).set_require_grad(trains);
            mapper.map_float(Param::initialized(self.id(), zeros)).is_require_grad()
        }, else trains)
    }

    /// The parameter's id.
    fn id(&self) -> ParamId {
        ParamId::from(self.id.get())
    }
}

/// A number that clones do not share: each has its own.
#[derive(Debug, Default)]
struct Number(AtomicU64);

impl Number {
    fn new(number: u64) -> Self {
        Number(AtomicU64::new(number))
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }
}

impl Clone for Number {
    fn clone(&self) -> Self {
        Number::new(self.get())
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
    use burn::optim::{GradientsParams, SgdConfig};
    use burn::tensor::{Gradients, Tensor};

    use crate::Ddp;
    use crate::intercept::warning_test_model::Pair;
    use crate::telemetry::test_event_capture::Listener;

    /// Steps by the gradients on the leaves of the parameters.
    struct ByLeaf<'a>(&'a Gradients);

    impl ModuleMapper for ByLeaf<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| match value.grad(self.0) {
                Some(gradient) => Tensor::from_inner(value.inner() - gradient).require_grad(),
                None => value,
            })
        }
    }

    /// Sums up squares of gradients.
    struct SquaredNorm<'a>(&'a Gradients, f32);

    impl ModuleVisitor for SquaredNorm<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = param.base().grad(self.0) {
                self.1 += gradient.powf_scalar(2.0).sum().into_scalar::<f32>();
            }
        }
    }

    struct Clamp;

    impl ModuleMapper for Clamp {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| Tensor::from_inner(value.inner().clamp(-9.0, 9.0)).require_grad())
        }
    }

    /// Results of four steps, in which rank 1 does not use `b`.
    #[derive(Debug, PartialEq)]
    struct Trained {
        /// Parameter and step of each warning of rank 1; rank 0 has none.
        warnings: Vec<(String, String)>,
        /// True if the ranks have the same parameters.
        same: bool,
    }

    /// `look` runs before each backward, and `step` after it, with the step's number.
    fn trained(look: impl Fn(&Pair) + Sync, step: impl Fn(usize, Pair, Gradients) -> Pair + Sync) -> Trained {
        let ranks = Ddp::spawn(2, |ddp| {
            let listener = Listener::default();
            let same = tracing::subscriber::with_default(listener.clone(), || {
                let mut model = ddp.wrap(Pair::ones())?;
                for number in 0..4 {
                    look(&model);
                    let loss = if ddp.is_main() { model.a.val() + model.b.val() } else { model.a.val() * 1.0 };
                    model = step(number, model, loss.backward());
                }
                anyhow::Ok(ddp.check_replicas(&model).is_ok())
            })?;
            let field = |event: &[(String, String)], name: &str| {
                event.iter().find(|(of, _)| of == name).map(|(_, value)| value.clone()).unwrap_or_default()
            };
            let events = listener.events("burn_ddp::gradients").into_iter();
            let warnings = events.map(|event| (field(&event, "parameter"), field(&event, "step"))).collect();
            Ok(Trained { warnings, same })
        });
        let [main, other] = ranks.unwrap().try_into().expect("two ranks");
        assert_eq!(main, Trained { warnings: Vec::new(), same: other.same });
        other
    }

    /// A warning of `b` in one step.
    fn warned(step: &str) -> Vec<(String, String)> {
        vec![("\"b\"".into(), step.into())]
    }

    #[test]
    fn a_step_by_hand_that_misses_an_average_is_warned_of_once() {
        let step = |_, model: Pair, grads: Gradients| model.map(&mut ByLeaf(&grads));
        let apart = Trained { warnings: warned("0"), same: false };
        assert_eq!(trained(|_| (), step), apart);
        assert_eq!(trained(|model| assert_eq!(model.num_params(), 2), step), apart);
        // Visitors that look at gradients or parameters take nothing.
        let looks = |_, model: Pair, grads: Gradients| {
            let mut norm = SquaredNorm(&grads, 0.0);
            model.visit(&mut norm);
            assert!(norm.1 > 1.0, "the average of b counts");
            assert_eq!(model.num_params(), 2);
            model.map(&mut ByLeaf(&grads))
        };
        assert_eq!(trained(|_| (), looks), apart);
    }

    #[test]
    fn two_gradients_are_stepped_as_in_burn_whatever_a_rank_uses() {
        let ranks = Ddp::spawn(2, |ddp| {
            let listener = Listener::default();
            let (model, part) = tracing::subscriber::with_default(listener.clone(), || {
                let (mut model, mut part) = (ddp.wrap(Pair::ones())?, ddp.wrap(Pair::ones())?);
                for _ in 0..3 {
                    // Each rank misses one parameter in the second backward. `a` is stepped before, `b` is not.
                    let of = |model: &Pair| {
                        let second = if ddp.is_main() { model.b.val() } else { model.a.val() };
                        [(model.a.val() * 2.0).backward(), (second * 3.0).backward()]
                    };
                    let [first, second] = of(&model);
                    model = model.step(first).step(second);
                    let [first, mut second] = of(&part);
                    part = part.step(first);
                    let of_b = GradientsParams::from_params(&mut second, &part, &[part.b.id]);
                    part = SgdConfig::new().init().step(0.1, part, of_b);
                }
                ddp.check_replicas(&part)?;
                anyhow::Ok((model, part))
            })?;
            let values = [&model.a, &model.b, &part.a, &part.b].map(|param| param.base().into_scalar::<f32>());
            Ok((values, listener.events("burn_ddp::gradients").len()))
        });
        let [(main, warnings), (other, none)] = ranks.unwrap().try_into().expect("two ranks");
        assert_eq!(main, other);
        assert!((main[0] - 0.4).abs() < 1e-6 && (main[1] - 0.55).abs() < 1e-6, "{main:?}");
        assert_eq!([warnings, none], [1, 0], "of `a` on the rank that finds it outdated");
    }

    #[test]
    fn a_norm_before_a_step_of_an_optimizer_is_not_warned_of() {
        let step = |_, model: Pair, grads: Gradients| {
            model.visit(&mut SquaredNorm(&grads, 0.0));
            model.step(grads).map(&mut Clamp)
        };
        assert_eq!(trained(|_| (), step), Trained { warnings: Vec::new(), same: true });
    }

    #[test]
    fn an_average_that_is_taken_after_the_model_was_changed_is_a_warning() {
        let changes_first = |_, model: Pair, grads: Gradients| model.map(&mut Clamp).step(grads);
        // Burn has no gradient of the new values on rank 0, and does not step `b` there.
        assert_eq!(trained(|_| (), changes_first), Trained { warnings: warned(""), same: false });
        struct Unchanged;
        impl ModuleMapper for Unchanged {}
        let only_looks = |_, model: Pair, grads: Gradients| model.map(&mut Unchanged).step(grads);
        assert_eq!(trained(|_| (), only_looks), Trained { warnings: warned(""), same: true });
    }

    #[test]
    fn a_record_that_is_loaded_after_the_backward_makes_its_averages_outdated_on_all_ranks() {
        let loads = |number, model: Pair, grads: Gradients| match number {
            2 => {
                let record = model.clone().into_record();
                model.load_record(record).step(grads)
            }
            _ => model.step(grads),
        };
        assert_eq!(trained(|_| (), loads), Trained { warnings: warned(""), same: true });
    }

    #[test]
    fn a_step_that_is_skipped_ends_no_job_if_the_model_is_changed() {
        let skips = |number, model: Pair, grads: Gradients| match number {
            2 => {
                drop(grads);
                model.map(&mut Clamp)
            }
            _ => model.step(grads).map(&mut Clamp),
        };
        assert_eq!(trained(|_| (), skips), Trained { warnings: Vec::new(), same: true });
        // Nothing says that this mapper does not look at the gradients that are there.
        let holds = |number, model: Pair, grads: Gradients| match number {
            2 => {
                let model = model.map(&mut Clamp);
                drop(grads);
                model
            }
            _ => model.step(grads).map(&mut Clamp),
        };
        assert_eq!(trained(|_| (), holds), Trained { warnings: warned("2"), same: true });
    }
}
