//! The supervisor under a fake clock: no process, no sleep.

use std::time::{Duration, Instant};

use libc::{SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP, SIGWINCH};

use burn_ddp_comm::post_mortem::Event as Reported;

use super::*;
use crate::report::stderr_tail::StderrSummary;

const GRACE: u64 = 1_000;

/// A supervisor, the time in milliseconds since its start, and a caller that wakes up exactly when it was asked to.
struct Bench {
    supervisor: Supervisor,
    start: Instant,
    now: u64,
}

/// Pid of a local rank.
fn pid(rank: usize) -> u32 {
    100 + rank as u32
}

fn exited(rank: usize, exit: RankExit, at: Instant) -> Event {
    Event::Exited { rank, exit, at }
}

fn signal(rank: usize, signal: i32) -> Action {
    Action::Signal { rank, signal }
}

/// `signal` to the groups of all of `ranks`.
fn all(ranks: usize, number: i32) -> Vec<Action> {
    (0..ranks).map(|rank| signal(rank, number)).collect()
}

/// SIGKILL to everything that ranks started.
fn sweep() -> Vec<Action> {
    vec![Action::SignalLeftovers(SIGKILL)]
}

fn announce(rank: usize, exit: RankExit) -> Action {
    Action::AnnounceExit { rank, pid: pid(rank), exit, failed: exit != RankExit::Code(0) }
}

impl Bench {
    fn new(ranks: usize) -> Self {
        Self::with(ranks, Duration::from_millis(GRACE), 0)
    }

    fn with(ranks: usize, grace: Duration, first_rank: usize) -> Self {
        let start = Instant::now();
        let settings = Settings {
            generation: 3,
            grace,
            preemption: Preemption::new(),
            first_rank,
            first_rank_has_terminal: false,
            shows_grace: false,
        };
        let mut supervisor = Supervisor::new(settings, start);
        (0..ranks).for_each(|rank| supervisor.add_rank(pid(rank), None));
        Self { supervisor, start, now: 0 }
    }

    fn time(&self) -> Instant {
        self.start + Duration::from_millis(self.now)
    }

    /// An event at the current time.
    fn event(&mut self, event: Event) -> Vec<Action> {
        self.supervisor.wake_at(self.time());
        self.supervisor.step(self.time(), Some(event))
    }

    fn exit(&mut self, rank: usize, exit: RankExit) -> Vec<Action> {
        self.event(exited(rank, exit, self.time()))
    }

    fn signal(&mut self, signal: i32) -> Vec<Action> {
        self.event(Event::Signal(signal))
    }

    /// Time passes; returns the actions of all wake-ups in it.
    fn pass(&mut self, ms: u64) -> Vec<Action> {
        let end = self.start + Duration::from_millis(self.now + ms);
        let (mut time, mut actions) = (self.time(), Vec::new());
        while let Some(wake) = self.supervisor.wake_at(time).filter(|wake| *wake <= end) {
            time = wake.max(time);
            actions.extend(self.supervisor.step(time, None));
            if self.supervisor.is_over() {
                break;
            }
        }
        self.now += ms;
        actions
    }

    /// This process does not run for a while, and so wakes up late.
    fn stall(&mut self, ms: u64) -> Vec<Action> {
        self.supervisor.wake_at(self.time());
        self.now += ms;
        self.supervisor.step(self.time(), None)
    }

    /// Ctrl-Z up to the moment at which this process stops: the ranks in `stop` stop at once.
    fn suspend(&mut self, stop: &[usize]) {
        assert_eq!(self.signal(SIGTSTP), [Action::AnnouncePause]);
        let sent = self.supervisor.pause_announced(self.time());
        let (last, expected) = (stop.len().checked_sub(1), stop.iter().map(|&rank| signal(rank, SIGSTOP)));
        let expected: Vec<_> = expected.chain(last.is_none().then_some(Action::StopLauncher)).collect();
        assert_eq!(sent, expected);
        for (i, &rank) in stop.iter().enumerate() {
            let then = if Some(i) == last { vec![Action::StopLauncher] } else { vec![] };
            assert_eq!(self.event(Event::Stopped { rank, signal: SIGSTOP }), then);
        }
    }

    /// `fg`: this process, then the ranks go on. Returns what follows.
    fn resume(&mut self, ranks: &[usize]) -> Vec<Action> {
        let sent = self.supervisor.launcher_continued(self.time());
        let continued: Vec<_> = ranks.iter().map(|&rank| signal(rank, SIGCONT)).collect();
        assert_eq!(sent[..ranks.len()], continued);
        let mut then = sent[ranks.len()..].to_vec();
        for &rank in ranks {
            assert_eq!(then, []);
            then = self.event(Event::Continued { rank });
        }
        assert_eq!(then.remove(0), Action::AnnounceResume);
        then
    }

    fn phase(&self) -> &'static str {
        match self.supervisor.phase {
            Phase::Running => "running",
            Phase::Settling { .. } => "settling",
            Phase::Stopping { .. } => "stopping",
            Phase::Killing { .. } => "killing",
            Phase::Draining { .. } => "draining",
            Phase::Terminating { .. } => "terminating",
            Phase::Flushing => "flushing",
            Phase::Over => "over",
        }
    }

    /// A bench of three ranks in a phase with ranks: rank 0 has failed in all but the first.
    fn in_phase(phase: &str) -> Self {
        let mut bench = Self::new(3);
        for next in ["running", "settling", "stopping", "killing"] {
            match next {
                "settling" => drop(bench.exit(0, RankExit::Code(7))),
                "stopping" | "killing" => drop(bench.pass(GRACE)),
                _ => {}
            }
            assert_eq!(bench.phase(), next);
            if next == phase {
                break;
            }
        }
        bench
    }

    fn outcome(self) -> NodeOutcome {
        assert!(self.supervisor.is_over(), "{}", self.phase());
        self.supervisor.into_outcome()
    }
}

const PHASES: [&str; 4] = ["running", "settling", "stopping", "killing"];

fn numbers(outcome: &NodeOutcome, wanted: fn(&RankOutcome) -> bool) -> Vec<usize> {
    outcome.ranks.iter().filter(|rank| wanted(rank)).map(|rank| rank.rank).collect()
}

/// Ranks that failed, were stopped, were killed.
fn fates(outcome: &NodeOutcome) -> [Vec<usize>; 3] {
    let (failed, stopped) = (numbers(outcome, |rank| rank.failed), numbers(outcome, |rank| rank.stopped));
    [failed, stopped, numbers(outcome, |rank| rank.killed)]
}

#[test]
fn a_job_whose_ranks_all_succeed_is_left_alone() {
    let mut bench = Bench::new(2);
    assert_eq!(bench.pass(60_000), []);
    assert_eq!(bench.exit(1, RankExit::Code(0)), [announce(1, RankExit::Code(0))]);
    assert_eq!((bench.phase(), bench.pass(60_000)), ("running", vec![]));
    let last = bench.exit(0, RankExit::Code(0));
    // What the ranks left behind is killed in any case.
    assert_eq!(last, [vec![announce(0, RankExit::Code(0))], sweep()].concat());
    let outcome = bench.outcome();
    assert_eq!(fates(&outcome), [const { Vec::<usize>::new() }; 3]);
    assert_eq!(outcome.elapsed, Duration::from_secs(120));
    assert_eq!(outcome.ranks[1].after, Duration::from_secs(60));
    assert_eq!((outcome.interrupted_by, outcome.signalled), (None, false));
}

#[test]
fn a_failure_gives_the_others_time_then_stops_then_kills_them() {
    for failure in [RankExit::Code(1), RankExit::Signal(libc::SIGSEGV), RankExit::Unknown] {
        let mut bench = Bench::new(3);
        assert_eq!(bench.exit(1, failure), [announce(1, failure)]);
        assert_eq!((bench.phase(), bench.pass(GRACE - 1)), ("settling", vec![]));
        assert_eq!((bench.pass(1), bench.phase()), (all(3, SIGTERM), "stopping"));
        assert_eq!(bench.pass(GRACE - 1), []);
        assert_eq!((bench.pass(1), bench.phase()), (all(3, SIGKILL), "killing"));
        assert_eq!(bench.exit(0, RankExit::Signal(SIGKILL)), []);
        assert_eq!(bench.exit(2, RankExit::Signal(SIGKILL)), sweep());
        let outcome = bench.outcome();
        assert_eq!(fates(&outcome), [vec![1], vec![0, 2], vec![0, 2]]);
        assert_eq!(outcome.ranks[1].exit, Some(failure));
    }
}

#[test]
fn the_others_have_three_seconds_to_settle_however_long_the_grace_time_is() {
    let mut bench = Bench::with(2, Duration::from_secs(60), 0);
    bench.exit(0, RankExit::Code(1));
    assert_eq!(bench.pass(2_999), []);
    assert_eq!(bench.pass(1), all(2, SIGTERM));
    assert_eq!(bench.pass(59_999), []);
    assert_eq!(bench.pass(1), all(2, SIGKILL));
}

#[test]
fn exits_of_each_kind_in_each_phase() {
    for phase in PHASES {
        for exit in [RankExit::Code(0), RankExit::Code(3), RankExit::Signal(SIGTERM)] {
            let mut bench = Bench::in_phase(phase);
            let announced = if ["running", "settling"].contains(&phase) { vec![announce(1, exit)] } else { vec![] };
            assert_eq!(bench.exit(1, exit), announced, "{phase}, {exit}");
            let failed = exit != RankExit::Code(0);
            let expected = if phase == "running" && failed { "settling" } else { phase };
            assert_eq!(bench.phase(), expected, "{exit}");
            bench.exit(0, RankExit::Code(0));
            bench.exit(2, RankExit::Code(0));
            let counts = fates(&bench.outcome())[0].contains(&1);
            assert_eq!(counts, failed && !announced.is_empty(), "{phase}, {exit}: it failed by itself");
        }
    }
}

#[test]
fn failures_are_kept_apart_from_exits_of_ranks_that_were_told_to_end() {
    let mut bench = Bench::with(4, Duration::from_millis(GRACE), 8);
    bench.exit(2, RankExit::Code(5));
    bench.pass(100);
    assert_eq!(bench.exit(1, RankExit::Code(6)).len(), 1, "a failure of its own");
    bench.pass(GRACE);
    bench.exit(0, RankExit::Code(9));
    bench.exit(3, RankExit::Code(0));
    let outcome = bench.outcome();
    assert_eq!(fates(&outcome), [vec![9, 10], vec![8, 11], vec![]]);
    let after: Vec<_> = outcome.ranks.iter().map(|rank| rank.after.as_millis()).collect();
    assert_eq!(after, [1_100, 100, 0, 1_100]);
}

#[test]
fn all_ranks_may_exit_in_any_phase() {
    for phase in PHASES {
        let mut bench = Bench::in_phase(phase);
        bench.exit(0, RankExit::Code(7));
        bench.exit(1, RankExit::Code(0));
        assert!(!bench.supervisor.is_over());
        assert!(bench.exit(2, RankExit::Code(0)).ends_with(&sweep()), "{phase}");
        bench.outcome();
    }
}

#[test]
fn a_signal_to_end_goes_to_all_ranks_and_starts_the_grace_time() {
    for number in [SIGINT, SIGTERM, SIGHUP] {
        let mut bench = Bench::new(2);
        let sent = bench.signal(number);
        assert_eq!(sent, [vec![Action::AnnounceInterrupt(number)], all(2, number)].concat());
        assert_eq!((bench.phase(), bench.pass(GRACE - 1)), ("stopping", vec![]));
        bench.exit(0, RankExit::Signal(number));
        assert_eq!(bench.pass(1), all(2, SIGKILL));
        bench.exit(1, RankExit::Signal(SIGKILL));
        let outcome = bench.outcome();
        assert_eq!(fates(&outcome), [vec![], vec![0, 1], vec![1]]);
        assert_eq!((outcome.interrupted_by, outcome.signalled), (Some(number), true));
    }
}

#[test]
fn the_first_interrupt_says_how_long_it_waits_and_what_a_second_one_does() {
    for (number, failed, shows_grace, grace, expected) in [
        (SIGINT, false, true, 10, 1),
        (SIGINT, true, true, 10, 1),
        (SIGINT, false, false, 10, 0),
        (SIGINT, false, true, 0, 0),
        (SIGTERM, false, true, 10, 0),
    ] {
        let mut bench = Bench::with(2, Duration::from_secs(grace), 0);
        bench.supervisor.settings.shows_grace = shows_grace;
        if failed {
            bench.exit(1, RankExit::Code(3));
        }
        let mut actions = bench.signal(number);
        actions.extend(bench.signal(number));
        let text = |action: &&Action| matches!(action, Action::Notice(text) if text.starts_with("waiting up to"));
        let count = actions.iter().filter(text).count();
        let exact = "waiting up to 10 s for the ranks to end; Ctrl-C again kills them";
        assert_eq!(actions.contains(&Action::Notice(exact.into())), expected == 1);
        assert_eq!(count, expected, "{number} {failed} {shows_grace}: {actions:?}");
    }
}

#[test]
fn a_signal_while_the_others_settle_stops_them_but_the_failure_stays_the_cause() {
    for number in [SIGINT, SIGTERM, SIGHUP] {
        let mut bench = Bench::in_phase("settling");
        assert_eq!(bench.signal(number), all(3, number));
        assert_eq!(bench.phase(), "stopping");
        bench.exit(1, RankExit::Code(0));
        bench.exit(2, RankExit::Code(0));
        let outcome = bench.outcome();
        assert_eq!((outcome.interrupted_by, outcome.signalled), (None, true));
        assert_eq!(fates(&outcome), [vec![0], vec![1, 2], vec![]]);
    }
}

#[test]
fn a_second_interrupt_kills_and_other_signals_are_passed_on() {
    let mut bench = Bench::in_phase("stopping");
    assert_eq!((bench.signal(SIGTERM), bench.phase()), (all(3, SIGTERM), "stopping"));
    assert_eq!((bench.signal(SIGHUP), bench.phase()), (all(3, SIGHUP), "stopping"));
    assert_eq!((bench.signal(SIGINT), bench.phase()), (all(3, SIGKILL), "killing"));
    assert_eq!((bench.signal(SIGINT), bench.phase()), (all(3, SIGINT), "killing"));
    bench.exit(1, RankExit::Signal(SIGKILL));
    bench.exit(2, RankExit::Signal(SIGKILL));
    assert_eq!(fates(&bench.outcome()), [vec![0], vec![1, 2], vec![1, 2]]);

    let mut twice = Bench::new(2);
    twice.signal(SIGINT);
    assert_eq!(twice.signal(SIGINT), all(2, SIGKILL));
}

#[test]
fn a_rank_that_no_kill_ends_is_given_up() {
    let mut bench = Bench::in_phase("killing");
    bench.exit(2, RankExit::Signal(SIGKILL));
    assert_eq!(bench.pass(29_999), []);
    assert_eq!(bench.pass(1), sweep());
    let outcome = bench.outcome();
    assert_eq!(outcome.ranks[1].exit, None);
    assert_eq!(outcome.ranks[1].after, outcome.elapsed);
}

#[test]
fn the_terminal_s_size_concerns_a_first_rank_that_has_it() {
    for phase in PHASES {
        let mut bench = Bench::in_phase(phase);
        assert_eq!(bench.signal(SIGWINCH), []);
        bench.supervisor.settings.first_rank_has_terminal = true;
        assert_eq!(bench.signal(SIGWINCH), [signal(0, SIGWINCH)]);
        assert_eq!((bench.phase(), bench.supervisor.signalled), (phase, false));
    }
}

#[test]
fn a_rank_that_someone_stops_is_named_and_hears_that_it_is_to_end() {
    let mut bench = Bench::with(2, Duration::from_millis(GRACE), 4);
    let stopped = bench.event(Event::Stopped { rank: 1, signal: SIGSTOP });
    let text = "rank 5 (pid 101) is stopped (SIGSTOP), the others wait for it; `kill -CONT 101` lets it go on";
    assert_eq!(stopped, [Action::Notice(text.into())]);
    let continued = bench.event(Event::Continued { rank: 1 });
    assert_eq!(continued, [Action::Notice("rank 5 (pid 101) goes on".into())]);
    bench.event(Event::Stopped { rank: 1, signal: SIGSTOP });
    let sent = bench.signal(SIGTERM);
    assert_eq!(sent[1..], [all(2, SIGTERM), vec![signal(1, SIGCONT)]].concat());
}

#[test]
fn ctrl_z_in_each_phase_stops_ranks_and_launcher_and_its_time_does_not_count() {
    for phase in PHASES {
        let mut bench = Bench::in_phase(phase);
        let running: &[usize] = if phase == "running" { &[0, 1, 2] } else { &[1, 2] };
        let before = bench.supervisor.phase.deadline();
        bench.pass(10);
        bench.suspend(running);
        bench.now += 3_600_000;
        assert_eq!(bench.resume(running), []);
        assert_eq!(bench.phase(), phase);
        let after = bench.supervisor.phase.deadline();
        assert_eq!(after, before.map(|until| until + Duration::from_secs(3600)));
        assert!(!bench.supervisor.signalled);
        if let Some(until) = before {
            let left = until.saturating_duration_since(bench.start).as_millis() as u64 + 3_600_000 - bench.now;
            assert_eq!(bench.pass(left - 1), [], "{phase}");
            assert_ne!(bench.pass(1), [], "{phase}");
        }
    }
}

#[test]
fn ctrl_z_leaves_alone_the_ranks_that_were_stopped_before() {
    let mut bench = Bench::new(3);
    bench.event(Event::Stopped { rank: 1, signal: SIGSTOP });
    bench.suspend(&[0, 2]);
    bench.resume(&[0, 2]);
    assert!(bench.supervisor.ranks[1].suspended);
}

#[test]
fn ctrl_z_waits_a_second_for_ranks_that_do_not_stop_or_go_on() {
    let mut bench = Bench::new(2);
    bench.signal(SIGTSTP);
    assert_eq!(bench.supervisor.pause_announced(bench.time()), all(2, SIGSTOP));
    assert_eq!(bench.event(Event::Stopped { rank: 0, signal: SIGSTOP }), []);
    assert_eq!(bench.pass(999), []);
    assert_eq!(bench.pass(1), [Action::StopLauncher]);
    assert_eq!(bench.supervisor.launcher_continued(bench.time()), all(2, SIGCONT));
    // Rank 1 was never seen to stop, so only an event of rank 0 or the time ends the wait.
    assert_eq!(bench.pass(999), []);
    assert_eq!(bench.pass(1), [Action::AnnounceResume]);
    assert_eq!(bench.event(Event::Continued { rank: 0 }).len(), 1, "late, so it is news");
}

#[test]
fn events_during_ctrl_z_are_taken_in_afterwards_in_their_order() {
    let mut bench = Bench::new(2);
    bench.signal(SIGTSTP);
    assert_eq!(bench.signal(SIGTERM), [], "the pause is being announced");
    bench.supervisor.pause_announced(bench.time());
    assert_eq!(bench.event(Event::Stopped { rank: 0, signal: SIGSTOP }), []);
    let failed = exited(1, RankExit::Code(4), bench.time());
    assert_eq!(bench.event(failed), [Action::StopLauncher], "a rank that exits need not stop");
    bench.now += 5_000;
    assert_eq!(bench.supervisor.launcher_continued(bench.time()), all(2, SIGCONT));
    let then = bench.event(Event::Continued { rank: 0 });
    assert_eq!(then, [vec![Action::AnnounceResume, Action::AnnounceInterrupt(SIGTERM)], all(2, SIGTERM)].concat());
    bench.exit(0, RankExit::Code(0));
    let outcome = bench.outcome();
    assert_eq!(fates(&outcome), [vec![], vec![0, 1], vec![]]);
    assert_eq!(outcome.interrupted_by, Some(SIGTERM));
}

#[test]
fn ctrl_z_twice_in_a_row_stops_twice() {
    let mut bench = Bench::new(1);
    bench.suspend(&[0]);
    assert_eq!(bench.signal(SIGTSTP), []);
    assert_eq!(bench.resume(&[0]), [Action::AnnouncePause]);
    assert_eq!(bench.supervisor.pause_announced(bench.time()), all(1, SIGSTOP));
    assert_eq!(bench.event(Event::Stopped { rank: 0, signal: SIGSTOP }), [Action::StopLauncher]);
    assert_eq!(bench.resume(&[0]), []);
    assert_eq!(bench.phase(), "running");
}

#[test]
fn all_ranks_may_exit_while_they_are_suspended() {
    let mut bench = Bench::new(2);
    bench.suspend(&[0, 1]);
    bench.exit(0, RankExit::Code(0));
    bench.exit(1, RankExit::Signal(SIGKILL));
    assert!(!bench.supervisor.is_over());
    assert_eq!(bench.supervisor.launcher_continued(bench.time()), all(2, SIGCONT));
    let then = bench.pass(1_000);
    assert_eq!(then[0], Action::AnnounceResume);
    assert!(then.ends_with(&sweep()), "{then:?}");
    assert_eq!(fates(&bench.outcome())[0], [1]);
}

#[test]
fn time_in_which_this_process_did_not_run_does_not_count() {
    for phase in ["settling", "stopping", "killing"] {
        let mut bench = Bench::in_phase(phase);
        let before = bench.supervisor.phase.deadline().unwrap();
        assert_eq!(bench.stall(600_000), [], "{phase}");
        // All but the 20 ms for which it had meant to sleep.
        let moved = bench.supervisor.phase.deadline().unwrap() - before;
        assert_eq!((bench.phase(), moved), (phase, Duration::from_millis(600_000 - 20)));
        // A wake-up that is a little late is not worth mentioning.
        bench.stall(40);
        assert_eq!(bench.supervisor.phase.deadline().unwrap() - before, moved);
    }
}

#[test]
fn the_end_of_the_generation_elsewhere_ends_it_here() {
    let failed = || Stop::Failed { rank: 9, host: "b".into(), pid: 5, exit: RankExit::Code(1) };
    let trouble = || Stop::Trouble(Trouble { message: "node 1 is lost".into(), exit_code: 1 });
    for stop in [failed(), trouble()] {
        let mut bench = Bench::new(2);
        assert_eq!(bench.event(Event::Ordered { generation: 3, stop }), []);
        assert_eq!((bench.phase(), bench.pass(GRACE)), ("settling", all(2, SIGTERM)));
        bench.exit(0, RankExit::Code(0));
        bench.exit(1, RankExit::Code(0));
        let outcome = bench.outcome();
        assert_eq!(fates(&outcome), [vec![], vec![0, 1], vec![]]);
        assert_eq!((outcome.trouble, outcome.interrupted_by, outcome.signalled), (None, None, false));
    }
}

#[test]
fn an_interrupt_elsewhere_stops_the_ranks_here_by_the_same_signal() {
    for phase in PHASES {
        let mut bench = Bench::in_phase(phase);
        let stop = Stop::Interrupted { host: "b".into(), signal: SIGINT };
        let sent = bench.event(Event::Ordered { generation: 3, stop });
        let lets_run = ["running", "settling"].contains(&phase);
        assert_eq!(sent, if lets_run { all(3, SIGINT) } else { vec![] }, "{phase}");
        assert_eq!(bench.phase(), if lets_run { "stopping" } else { phase });
        assert!(!bench.supervisor.signalled, "the signal was not this process's");
        assert_eq!(bench.supervisor.interrupted_by, None);
    }
}

#[test]
fn news_of_another_generation_is_ignored() {
    let mut bench = Bench::new(2);
    let stop = Stop::Interrupted { host: "b".into(), signal: SIGINT };
    assert_eq!((bench.event(Event::Ordered { generation: 2, stop }), bench.phase()), (vec![], "running"));
}

#[test]
fn a_cut_link_is_trouble_and_the_first_one_counts() {
    for phase in PHASES {
        let mut bench = Bench::in_phase(phase);
        let cut = |message: &str| Event::Cut(Trouble { message: message.into(), exit_code: 1 });
        assert_eq!(bench.event(cut("node 0 is gone")), []);
        assert_eq!(bench.phase(), if phase == "running" { "settling" } else { phase });
        bench.event(cut("again"));
        (0..3).for_each(|rank| drop(bench.exit(rank, RankExit::Code(0))));
        let outcome = bench.outcome();
        assert_eq!(outcome.trouble.unwrap().message, "node 0 is gone");
    }
}

#[test]
fn a_signal_after_trouble_is_no_interrupt_of_the_job() {
    let mut bench = Bench::new(2);
    bench.event(Event::Cut(Trouble { message: "node 0 is gone".into(), exit_code: 1 }));
    assert_eq!(bench.signal(SIGINT), all(2, SIGINT));
    assert_eq!((bench.supervisor.interrupted_by, bench.supervisor.signalled), (None, true));
}

fn relayed(lost: Option<&str>) -> Event {
    let tail = |line: &str| StderrSummary { lines: vec![line.into()], panics: Vec::new() };
    Event::Relayed(Relayed { tails: vec![tail("zero"), tail("one")], lost: lost.map(str::to_owned) })
}

/// A bench of two ranks with a relay, both exited: rank 0 with 0 and rank 1 with 1.
fn drained() -> Bench {
    let mut bench = Bench::new(2);
    bench.supervisor.relay_started();
    bench.exit(0, RankExit::Code(0));
    assert_eq!(bench.exit(1, RankExit::Code(1)), [announce(1, RankExit::Code(1))]);
    assert_eq!(bench.phase(), "draining");
    bench
}

#[test]
fn output_that_ends_with_the_ranks_is_not_waited_for() {
    let mut bench = drained();
    let sent = bench.event(relayed(None));
    assert_eq!(sent, [sweep(), vec![Action::CloseOutput]].concat());
    let outcome = bench.outcome();
    assert_eq!(outcome.ranks[1].last_lines, ["one"]);
    assert_eq!(outcome.ranks[0].last_lines, [""; 0], "of ranks that failed alone");

    let mut early = Bench::new(1);
    early.supervisor.relay_started();
    early.event(relayed(Some("disk full")));
    early.exit(0, RankExit::Code(0));
    assert_eq!(early.outcome().output_lost.as_deref(), Some("disk full"));
}

#[test]
fn leftover_processes_have_a_second_and_another_after_sigterm() {
    let mut bench = drained();
    assert_eq!(bench.pass(999), []);
    assert_eq!((bench.pass(1), bench.phase()), (vec![Action::SignalLeftovers(SIGTERM)], "terminating"));
    assert_eq!(bench.pass(999), []);
    let killed = [sweep(), vec![Action::CloseOutput]].concat();
    assert_eq!((bench.pass(1), bench.phase()), (killed, "flushing"));
    assert_eq!(bench.supervisor.wake_at(bench.time()), None, "a paused reader may take its time");
    assert_eq!(bench.event(relayed(None)), []);
    let outcome = bench.outcome();
    assert_eq!((outcome.elapsed, outcome.output_lost), (Duration::ZERO, None));
}

#[test]
fn a_signal_ends_the_wait_for_output_in_each_phase_of_it() {
    for (wait, phase) in [(0, "draining"), (1_000, "terminating"), (2_000, "flushing")] {
        for number in [SIGINT, SIGTERM] {
            let mut bench = drained();
            bench.pass(wait);
            assert_eq!(bench.phase(), phase);
            for harmless in [SIGWINCH, SIGTSTP] {
                assert_eq!((bench.signal(harmless), bench.phase()), (vec![], phase));
            }
            bench.signal(number);
            let outcome = bench.outcome();
            assert_eq!(outcome.output_lost.as_deref(), Some("the rest of the output was dropped at a signal"));
            // The job was over already, but there is to be no restart.
            assert_eq!((outcome.interrupted_by, outcome.signalled), (None, true));
        }
    }
}

#[test]
fn an_exit_after_the_rank_was_given_up_still_counts() {
    let mut bench = Bench::new(1);
    bench.supervisor.relay_started();
    bench.signal(SIGINT);
    bench.signal(SIGINT);
    bench.pass(30_000);
    assert_eq!(bench.phase(), "draining");
    bench.exit(0, RankExit::Signal(SIGKILL));
    bench.event(relayed(None));
    assert_eq!(bench.outcome().ranks[0].exit, Some(RankExit::Signal(SIGKILL)));
}

#[test]
fn a_job_that_cannot_be_started_kills_what_was_started() {
    let mut bench = Bench::new(2);
    let time = bench.time();
    assert_eq!(bench.supervisor.abort(time), all(2, SIGKILL));
    bench.exit(0, RankExit::Signal(SIGKILL));
    assert!(!bench.supervisor.is_over());
    bench.exit(1, RankExit::Signal(SIGKILL));
    assert!(bench.supervisor.is_over());

    let mut stuck = Bench::new(1);
    stuck.supervisor.abort(stuck.start);
    stuck.pass(30_000);
    assert!(stuck.supervisor.is_over(), "it is not waited for longer");
    let mut none = Bench::new(0);
    none.supervisor.abort(none.start);
    assert!(none.supervisor.is_over());
}

#[test]
fn the_caller_wakes_up_often_enough() {
    let mut bench = Bench::new(2);
    let wake = |bench: &mut Bench| bench.supervisor.wake_at(bench.time()).map(|wake| wake - bench.time());
    assert_eq!(wake(&mut bench), Some(TURN), "to read the ranks' reports");
    bench.exit(0, RankExit::Code(1));
    assert_eq!(wake(&mut bench), Some(SHORT_TURN), "to notice that it did not run");
    bench.pass(GRACE - 5);
    assert_eq!(wake(&mut bench), Some(Duration::from_millis(5)), "at the deadline");
}

const SAVE: u64 = 60_000;

/// Ranks that have caught the signal that asks to stop.
fn able(ranks: usize) -> Bench {
    let mut bench = Bench::new(ranks);
    (0..ranks).for_each(|rank| bench.supervisor.note(&Reported::CanStop { rank, at: 1 }));
    bench
}

#[test]
fn ranks_that_can_stop_have_longer_to_save() {
    let mut bench = able(2);
    assert_eq!(bench.signal(SIGTERM), [vec![Action::AnnounceInterrupt(SIGTERM)], all(2, SIGTERM)].concat());
    assert_eq!(bench.pass(SAVE - 1), []);
    assert_eq!(bench.pass(1), all(2, SIGKILL));
    // Told by another launcher, or told before the launcher knows that its ranks can stop.
    let mut bench = Bench::new(2);
    let stop = Stop::Interrupted { host: "other".into(), signal: SIGTERM };
    assert_eq!(bench.event(Event::Ordered { generation: 3, stop }), all(2, SIGTERM));
    bench.pass(GRACE - 1);
    bench.supervisor.note(&Reported::CanStop { rank: 1, at: 1 });
    assert_eq!(bench.pass(SAVE - GRACE), []);
    assert_eq!(bench.pass(1), all(2, SIGKILL));
    // Another signal, and a failure, are no wish.
    let mut bench = able(2);
    bench.signal(SIGHUP);
    assert_eq!(bench.pass(GRACE), all(2, SIGKILL));
    let mut bench = able(2);
    bench.exit(0, RankExit::Code(1));
    assert_eq!([bench.pass(GRACE), bench.pass(GRACE)], [all(2, SIGTERM), all(2, SIGKILL)]);
}

#[test]
fn a_second_signal_leaves_no_time_to_save() {
    let mut bench = able(2);
    bench.signal(SIGTERM);
    // The same one, by another way.
    assert_eq!(bench.signal(SIGTERM), []);
    bench.pass(1_500);
    assert_eq!(bench.signal(SIGTERM), [vec![Action::AnnounceHurry(SIGTERM)], all(2, SIGTERM)].concat());
    assert_eq!(bench.pass(GRACE), all(2, SIGKILL));
    let outcome = {
        bench.exit(0, RankExit::Signal(SIGKILL));
        bench.exit(1, RankExit::Signal(SIGKILL));
        bench.outcome()
    };
    assert!(outcome.asked && outcome.hurried);
}

#[test]
fn a_rank_that_was_to_save_and_did_not_failed() {
    let code = i32::from(burn_ddp_comm::StopSignal::EXIT_CODE);
    for (exit, reports, failed) in [
        (RankExit::Code(0), true, false),
        (RankExit::Code(code), true, false),
        (RankExit::Code(code), false, true),
        (RankExit::Code(1), true, true),
        (RankExit::Signal(libc::SIGSEGV), true, true),
        (RankExit::Signal(SIGTERM), false, false),
    ] {
        let mut bench = able(2);
        bench.signal(SIGTERM);
        let stopping = Reported::Stopping { rank: 1, at: 2 };
        reports.then(|| bench.supervisor.note(&stopping));
        bench.exit(1, exit);
        bench.exit(0, RankExit::Code(0));
        let outcome = bench.outcome();
        assert_eq!(fates(&outcome)[0], if failed { vec![1] } else { vec![] }, "{exit} {reports}");
        assert_eq!((outcome.can_stop, outcome.stopping), (true, reports));
    }
    // The ranks agreed by themselves: no signal came here.
    let mut bench = able(2);
    (0..2).for_each(|rank| bench.supervisor.note(&Reported::Stopping { rank, at: 2 }));
    let announced = Action::AnnounceExit { rank: 0, pid: pid(0), exit: RankExit::Code(code), failed: false };
    assert_eq!(bench.exit(0, RankExit::Code(code)), [announced]);
    bench.exit(1, RankExit::Code(code));
    let outcome = bench.outcome();
    assert_eq!((fates(&outcome)[0].len(), outcome.asked, outcome.stopping), (0, false, true));
}

#[test]
fn a_further_signal_to_another_launcher_counts_here_too() {
    for (signal, expected) in [(SIGTERM, all(2, SIGTERM)), (SIGINT, all(2, SIGKILL))] {
        let mut bench = able(2);
        bench.signal(SIGTERM);
        let stop = Stop::Hurried { signal };
        assert_eq!(bench.event(Event::Ordered { generation: 3, stop: stop.clone() }), expected);
        assert_eq!(bench.event(Event::Ordered { generation: 3, stop }), [], "once");
        assert!(bench.supervisor.hurried);
    }
}

#[test]
fn after_a_failure_ranks_that_can_stop_are_told_twice_that_they_end() {
    let mut bench = able(2);
    bench.supervisor.settings.grace = Duration::from_secs(60);
    bench.exit(0, RankExit::Code(1));
    assert_eq!(bench.pass(3_000), all(2, SIGTERM));
    assert_eq!(bench.pass(1_499), []);
    assert_eq!(bench.pass(60), all(2, SIGTERM));
    assert_eq!(bench.pass(50_000), []);
}

#[test]
fn a_rank_that_a_chosen_signal_kills_before_it_looked_asks_for_all() {
    let by_signal = RankExit::Signal(SIGTERM);
    let mut bench = Bench::new(2);
    bench.supervisor.settings.preemption.is_chosen = true;
    assert_eq!(bench.exit(1, by_signal), [vec![Action::AnnounceInterrupt(SIGTERM)], all(2, SIGTERM)].concat());
    bench.exit(0, by_signal);
    let outcome = bench.outcome();
    assert_eq!((fates(&outcome)[0].len(), outcome.asked, outcome.interrupted_by), (0, true, Some(SIGTERM)));
    let mut bench = Bench::new(2);
    assert_eq!(bench.exit(1, by_signal), [announce(1, by_signal)], "it was not chosen");
}
