//! Counts where the time of steps goes, and records it in the timeline and with `tracing`.

use std::fmt::Display;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use burn_ddp_comm::timeline::{Fact, Timeline};
use burn_ddp_comm::{GroupId, ProcessGroup, World};

use super::memory_use::MemoryUse;
use super::step_counters::Stats;
use super::straggler::{self, REPORT_LEN, Straggler};

/// Counters of one rank. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Meter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    world: World,
    /// Group on which the program calls collectives by itself.
    group: Arc<ProcessGroup>,
    timeline: Timeline,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    total: Stats,
    /// `total` at the end of the last step.
    until_last: Stats,
    /// Counters of the last step.
    last: Stats,
    /// `total` at the end of the first step.
    warm_up: Option<Stats>,
    /// Consumed by the next backward that begins.
    pause: Option<Pause>,
    straggler: Option<Straggler>,
    /// The loss scale of the model that ended a step last, if it has one.
    loss_scale: Option<f64>,
    /// Memory of the wrapped models that exist; each model owns its entry.
    memory: Vec<Weak<MemoryUse>>,
}

/// Time since the last backward.
#[derive(Clone, Copy, Debug)]
struct Pause {
    since: Instant,
    /// Duration of all calls until `since`, and of those in saves since then.
    calls: Duration,
    /// Duration of saves.
    saving: Duration,
}

/// A save under way, from [`Meter::saving`]; its time is counted when this is dropped.
pub(crate) struct Saving<'m> {
    meter: &'m Meter,
    since: Instant,
    /// Duration of all calls when it began.
    calls: Duration,
}

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        let calls = self.meter.0.group.time_in_calls().saturating_sub(self.calls);
        if let Some(pause) = &mut self.meter.counts().pause {
            pause.saving += self.since.elapsed();
            pause.calls += calls;
        }
    }
}

impl Meter {
    pub(crate) fn new(world: World, group: Arc<ProcessGroup>) -> Meter {
        let timeline = world.timeline();
        Meter(Arc::new(Inner { world, group, timeline, counts: Mutex::default() }))
    }

    pub(crate) fn total(&self) -> Stats {
        self.counts().total
    }

    pub(crate) fn last_step(&self) -> Stats {
        self.counts().last
    }

    /// Counters of all steps but the first, in which memory is allocated and kernels are compiled.
    pub(crate) fn after_first_step(&self) -> Stats {
        let counts = self.counts();
        // What has been counted since the last step ended belongs to no step yet.
        counts.warm_up.map_or_else(Stats::default, |warm_up| counts.until_last - warm_up)
    }

    /// Counts the time until the guard is dropped as saving.
    pub(crate) fn saving(&self) -> Saving<'_> {
        Saving { meter: self, since: Instant::now(), calls: self.0.group.time_in_calls() }
    }

    /// Counts the memory of a wrapped model as long as the returned value exists.
    pub(crate) fn holds(&self, memory: MemoryUse) -> Arc<MemoryUse> {
        let memory = Arc::new(memory);
        let models = &mut self.counts().memory;
        models.retain(|model| model.strong_count() > 0);
        models.push(Arc::downgrade(&memory));
        memory
    }

    /// Memory of all wrapped models that exist.
    pub(crate) fn memory(&self) -> MemoryUse {
        self.counts().memory.iter().filter_map(Weak::upgrade).map(|memory| *memory).sum()
    }

    pub(crate) fn straggler(&self) -> Option<Straggler> {
        self.counts().straggler.clone()
    }

    /// Records a batch of a loader, which was asked for at `asked` and has arrived now.
    pub(crate) fn batch(&self, loader: u32, asked: Instant) {
        let time = asked..Instant::now();
        {
            let mut counts = self.counts();
            // Waiting counts only if it lies between two backwards.
            if counts.pause.is_some_and(|pause| pause.since <= time.start) {
                counts.total.data += time.end - time.start;
            }
        }
        if self.0.timeline.is_on() {
            self.0.timeline.span(&format!("loader {loader}"), "batch", time, &[]);
        }
    }

    /// Counts a comparison in which parameters of the ranks differed by `rounding`. Logs the first one of each model.
    pub(crate) fn rounded(&self, rounding: &impl Display, step: Option<u64>, first: bool) {
        self.counts().total.rounded += 1;
        if first && self.0.group.rank() == 0 {
            tracing::warn!(
                target: "burn_ddp::replicas",
                step,
                "the ranks' parameters differ by rounding: {rounding}. Flex with several threads adds up 4 Mi elements \
                and more in an order that changes (norm clipping, LAMB, Adafactor, Muon), and GPUs of different kinds \
                round differently. Training goes on, `save` writes rank 0's parameters, and `stats().rounded` counts \
                such comparisons"
            );
        }
    }

    /// Records the loss scale of a model after a step, if it has one.
    pub(crate) fn scaled(&self, loss_scale: Option<f64>) {
        self.counts().loss_scale = loss_scale;
    }

    /// Counts a call that reduced, if it was `skipped`.
    pub(crate) fn skipped(&self, skipped: bool) {
        self.counts().total.skipped += u64::from(skipped);
    }

    /// The loss scale of the model that ended a step last, if it has one.
    pub(crate) fn loss_scale(&self) -> Option<f64> {
        self.counts().loss_scale
    }

    /// Counts a gather of a sharded parameter; the rows of all ranks together have this number of bytes.
    pub(crate) fn gathered(&self, bytes: usize) {
        self.counts().total.gathered += bytes as u64;
    }

    /// Counts the reduction of the gradient of a sharded parameter.
    pub(crate) fn reduced(&self, bytes: usize) {
        let mut counts = self.counts();
        counts.total.collectives += 1;
        counts.total.tensors += 1;
        counts.total.bytes += bytes as u64;
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Measures the steps of one wrapped model. The order of calls: [`begin`](Self::begin), [`launched`](Self::launched)
/// for each bucket, [`waits`](Self::waits) and [`done`](Self::done) as long as communication is pending, then
/// [`end_backward`](Self::end_backward) or [`end_step`](Self::end_step).
#[derive(Debug)]
pub(crate) struct StepMeter {
    meter: Meter,
    /// The number of the model's group.
    model: u64,
    /// Its rows in the timeline.
    training: String,
    communication: String,
    began: Option<Instant>,
    /// Time at which the previous step ended; at first, time at which the first backward began.
    step_began: Option<Instant>,
    /// Waiting time of the running step.
    wait: Duration,
    /// Counters at the last comparison of the ranks.
    reported: Stats,
}

impl StepMeter {
    pub(crate) fn new(meter: Meter, model: u64) -> StepMeter {
        let row = |what| format!("model {}: {what}", GroupId(model));
        let (training, communication) = (row("training"), row("communication"));
        let (began, step_began, wait) = (None, None, Duration::ZERO);
        StepMeter { meter, model, training, communication, began, step_began, wait, reported: Stats::default() }
    }

    /// Begins a backward.
    pub(crate) fn begin(&mut self) {
        let now = Instant::now();
        self.began = Some(now);
        self.step_began.get_or_insert(now);
        self.wait = Duration::ZERO;
        let called = self.meter.0.group.time_in_calls();
        let mut counts = self.meter.counts();
        let Some(Pause { since, calls, saving }) = counts.pause.take() else { return };
        counts.total.outside += now - since;
        counts.total.calls += called.saturating_sub(calls).min(now - since);
        counts.total.saving += saving;
        drop(counts);
        self.show("outside backward", since..now, &[]);
    }

    /// Counts a bucket of `tensors` gradients that is handed to the engine.
    pub(crate) fn launched(&mut self, tensors: usize, bytes: usize, overlapped: bool) {
        let mut counts = self.meter.counts();
        counts.total.collectives += 1;
        counts.total.overlapped += u64::from(overlapped);
        counts.total.tensors += tensors as u64;
        counts.total.bytes += bytes as u64;
    }

    /// Counts a wait of backward from `since` until now.
    pub(crate) fn waits(&mut self, since: Instant) -> Instant {
        let now = Instant::now();
        self.wait += now - since;
        self.show("wait", since..now, &[]);
        now
    }

    /// Counts a finished communication.
    pub(crate) fn done(&mut self, what: Communication, time: Range<Instant>) {
        self.meter.counts().total.busy += time.end - time.start;
        let timeline = &self.meter.0.timeline;
        if timeline.is_on() {
            match what {
                Communication::Bucket { bucket, bytes, step } => {
                    let facts = [("bytes", Fact::Number(bytes as u64)), ("step", Fact::Number(step))];
                    timeline.span(&self.communication, format_args!("bucket {bucket}"), time, &facts);
                }
                Communication::Other(name) => timeline.span(&self.communication, name, time, &[]),
            }
        }
    }

    /// Ends a backward without reduction.
    pub(crate) fn end_backward(&mut self) {
        self.backward_ended(Instant::now());
        self.meter.counts().total.added_up += 1;
    }

    /// Ends a backward that reduced, at `now`.
    pub(crate) fn end_step(&mut self, step: u64, now: Instant) {
        self.backward_ended(now);
        let last = {
            let mut counts = self.meter.counts();
            counts.total.steps += 1;
            counts.total.wait += self.wait;
            counts.last = counts.total - counts.until_last;
            counts.until_last = counts.total;
            counts.warm_up = counts.warm_up.or(Some(counts.total));
            counts.last
        };
        let begin = self.step_began.replace(now).unwrap_or(now);
        self.show(
            format_args!("step {step}"),
            begin..now,
            &[("step", Fact::Number(step)), ("bytes", Fact::Number(last.bytes))],
        );
        let us = |time: Duration| time.as_micros() as u64;
        tracing::debug!(
            target: "burn_ddp::step",
            step,
            model = self.model,
            time_us = us(last.time()),
            outside_us = us(last.outside),
            data_us = us(last.data),
            calls_us = us(last.calls),
            saving_us = us(last.saving),
            backward_us = us(last.backward),
            wait_us = us(last.wait),
            busy_us = us(last.busy),
            collectives = last.collectives,
            overlapped = last.overlapped,
            bytes = last.bytes,
        );
    }

    fn backward_ended(&mut self, now: Instant) {
        let Some(began) = self.began.take() else { return };
        self.show("backward", began..now, &[]);
        let called = self.meter.0.group.time_in_calls();
        let mut counts = self.meter.counts();
        counts.total.backward += (now - began).saturating_sub(self.wait);
        counts.pause = Some(Pause { since: now, calls: called, saving: Duration::ZERO });
    }

    /// Report to the other ranks on the steps since the last report.
    pub(crate) fn report(&mut self) -> [i64; REPORT_LEN] {
        let total = self.meter.total();
        straggler::report(total - std::mem::replace(&mut self.reported, total))
    }

    /// Compares the reports of all ranks. Logs a straggler once, and again after another result.
    pub(crate) fn compare(&mut self, reports: &[Vec<i64>]) {
        let Inner { world, group, .. } = &*self.meter.0;
        let peer = |nth: usize| group.ranks().get(nth).and_then(|rank| world.peers().get(*rank));
        let found = straggler::find(reports, |nth| match peer(nth) {
            Some(peer) => (peer.rank, peer.host.clone()),
            None => (nth, String::new()),
        });
        let before = std::mem::replace(&mut self.meter.counts().straggler, found.clone());
        let known = before.map(|before| before.rank);
        match found {
            Some(found) if group.rank() == 0 && known != Some(found.rank) => {
                tracing::warn!(target: "burn_ddp::straggler", rank = found.rank, host = found.host, "{found}");
            }
            _ => {}
        }
    }

    fn show(&self, name: impl std::fmt::Display, time: Range<Instant>, facts: &[(&str, Fact<'_>)]) {
        self.meter.0.timeline.span(&self.training, name, time, facts);
    }
}

/// Content of a communication.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Communication {
    /// Gradients.
    Bucket { bucket: usize, bytes: usize, step: u64 },
    /// Anything else of a step.
    Other(&'static str),
}

#[cfg(test)]
mod tests {
    use burn_ddp_comm::WorldOptions;

    use super::*;
    use crate::telemetry::test_event_capture::Listener;

    fn step_meter() -> StepMeter {
        let world = World::solo(WorldOptions::default());
        let group = Arc::new(world.group().unwrap());
        StepMeter::new(Meter::new(world, group), 2)
    }

    #[test]
    fn a_step_is_logged() {
        let listener = Listener::default();
        tracing::subscriber::with_default(listener.clone(), || {
            let mut meter = step_meter();
            meter.begin();
            meter.launched(1, 100, true);
            let now = meter.waits(Instant::now());
            meter.end_step(0, now);
            meter.begin();
            meter.launched(1, 40, false);
            meter.launched(1, 50, false);
            meter.end_step(1, Instant::now());
        });
        let events = listener.events("burn_ddp::step");
        let value = |nth: usize, name: &str| {
            events[nth].iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()).unwrap()
        };
        assert_eq!(events.len(), 2);
        assert_eq!(
            (value(0, "step"), value(0, "model"), value(0, "bytes"), value(0, "overlapped")),
            ("0".into(), "2".into(), "100".into(), "1".into())
        );
        assert_eq!(
            (value(1, "step"), value(1, "bytes"), value(1, "collectives")),
            ("1".into(), "90".into(), "2".into())
        );
        assert_eq!(value(1, "overlapped"), "0");
    }

    #[test]
    fn a_straggler_is_logged_once_until_it_changes() {
        let listener = Listener::default();
        let slow = |rank: usize| {
            (0..3).map(|r| vec![10, if r == rank { 90_000_000 } else { 10_000_000 }, 0]).collect::<Vec<_>>()
        };
        let meter = tracing::subscriber::with_default(listener.clone(), || {
            let mut meter = step_meter();
            for reports in [slow(1), slow(1), slow(2), slow(9), slow(2)] {
                meter.compare(&reports);
            }
            meter
        });
        assert_eq!(meter.meter.straggler().map(|s| (s.rank, s.work)), Some((2, Duration::from_millis(9))));
        let events = listener.events("burn_ddp::straggler");
        let message = |nth: usize| events[nth].iter().find(|(name, _)| name == "message").unwrap().1.clone();
        assert_eq!(events.len(), 3, "1, 2, and 2 again after it had recovered");
        assert!(message(0).contains("rank 1 ") && message(2).contains("rank 2 "), "{events:?}");
    }
}
