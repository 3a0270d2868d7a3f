//! One collective call: what it is, until when it may take, and whether peers called the same.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::frame::Header;
use crate::{DType, Error, ReduceOp, Result};

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Collective {
    /// Making a group.
    NewGroup,
    /// Everybody waits for everybody.
    Barrier,
    /// Everybody gets the reduction of everybody's buffer.
    AllReduce,
    /// Everybody gets the weighted mean of everybody's buffer.
    AllReduceWeighted,
    /// Everybody gets the root's buffer.
    Broadcast,
    /// Everybody gets everybody's buffer.
    AllGather,
    /// Everybody gets a slice of the reduction.
    ReduceScatter,
    /// Everybody gets the root's value.
    BroadcastObject,
    /// Everybody gets everybody's value.
    AllGatherObject,
}

impl Collective {
    const ALL: [Collective; 9] = [
        Collective::NewGroup,
        Collective::Barrier,
        Collective::AllReduce,
        Collective::AllReduceWeighted,
        Collective::Broadcast,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::BroadcastObject,
        Collective::AllGatherObject,
    ];

    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_code(code: u8) -> Option<Collective> {
        Collective::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::NewGroup => "group",
            Collective::Barrier => "barrier",
            Collective::AllReduce => "all_reduce",
            Collective::AllReduceWeighted => "all_reduce_weighted",
            Collective::Broadcast => "broadcast",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::BroadcastObject => "broadcast_object",
            Collective::AllGatherObject => "all_gather_object",
        })
    }
}

/// The line that called: shown, never compared when calls are.
#[derive(Clone, Debug, Default)]
pub enum CallSite {
    /// Not known.
    #[default]
    Unknown,
    /// A line of this program.
    Here(&'static Location<'static>),
    /// What another rank said: `file:line:column`.
    There(Arc<str>),
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallSite::Unknown => f.write_str("an unknown line"),
            CallSite::Here(location) => location.fmt(f),
            CallSite::There(text) => f.write_str(text),
        }
    }
}

impl From<&str> for CallSite {
    fn from(text: &str) -> CallSite {
        CallSite::There(text.into())
    }
}

impl From<&'static Location<'static>> for CallSite {
    fn from(location: &'static Location<'static>) -> CallSite {
        CallSite::Here(location)
    }
}

impl PartialEq for CallSite {
    fn eq(&self, other: &CallSite) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for CallSite {}

impl Serialize for CallSite {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CallSite {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<CallSite, D::Error> {
        String::deserialize(deserializer).map(|text| CallSite::There(text.into()))
    }
}

/// What identifies a call, the line it was made from and the step it was made in. All but line and step must be alike on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallInfo {
    /// What it does.
    pub collective: Collective,
    /// How elements are reduced, for collectives that do.
    pub reduce: Option<ReduceOp>,
    /// The type of the elements, for collectives that carry elements.
    pub dtype: Option<DType>,
    /// The elements each rank passes (`reduce_scatter`: gets).
    pub len_elems: u64,
    /// The root's rank, for collectives that have one.
    pub root: Option<usize>,
    /// The caller's own mark, such as which bucket of which step; 0 if it has none.
    pub tag: u64,
    /// The group's number in its world.
    pub group: u64,
    /// How many calls on this group came before.
    pub sequence: u64,
    /// The line that called. Shown, never compared.
    pub site: CallSite,
    /// The training step, if the program says; see [`World::set_step`](crate::World::set_step). Shown, never compared.
    pub step: Option<u64>,
}

impl CallInfo {
    /// The names of what differs from a peer's call.
    pub fn differences(&self, other: &CallInfo) -> Vec<&'static str> {
        let mut names = Vec::new();
        let mut compare = |differs: bool, name| {
            if differs {
                names.push(name);
            }
        };
        compare(self.collective != other.collective, "collectives");
        compare(self.group != other.group, "groups");
        compare(self.sequence != other.sequence, "sequence numbers");
        if self.collective == other.collective {
            compare(self.reduce != other.reduce, "reduce ops");
            compare(self.dtype != other.dtype, "dtypes");
            compare(self.len_elems != other.len_elems, "lengths");
            compare(self.root != other.root, "roots");
            compare(self.tag != other.tag, "tags");
        }
        names
    }
}

impl CallInfo {
    /// What it does to what, without where and when: `all_reduce (f32, sum, 10 elements)`.
    pub fn operation(&self) -> String {
        format!("{}{}", self.collective, self.details())
    }

    fn details(&self) -> String {
        let mut details = Vec::new();
        if let Some(dtype) = self.dtype {
            details.push(dtype.to_string());
        }
        if let Some(reduce) = self.reduce {
            details.push(reduce.to_string());
        }
        if let Some(root) = self.root {
            details.push(format!("root {root}"));
        }
        if self.dtype.is_some() {
            let plural = if self.len_elems == 1 { "" } else { "s" };
            details.push(format!("{} element{plural}", self.len_elems));
        }
        if self.tag != 0 {
            details.push(format!("tag {:#x}", self.tag));
        }
        if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) }
    }
}

impl fmt::Display for CallInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.collective == Collective::NewGroup {
            write!(f, "World::group (group {})", self.group)?;
        } else {
            write!(f, "{} #{} of group {}{}", self.collective, self.sequence, self.group, self.details())?;
        }
        if let Some(step) = self.step {
            write!(f, " in step {step}")?;
        }
        write!(f, " called at {}", self.site)
    }
}

/// A call and the rank that made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCall {
    /// Who called.
    pub rank: usize,
    /// What it called.
    pub call: CallInfo,
}

/// Whose part of an exchange has not come. Written by the exchange, read by whoever reports.
#[derive(Debug, Default)]
pub struct Awaited(Box<[AtomicBool]>);

impl Awaited {
    /// Of a world of `world_size`, nobody.
    pub fn new(world_size: usize) -> Awaited {
        Awaited((0..world_size).map(|_| AtomicBool::new(false)).collect())
    }

    /// The exchange waits for `peer`.
    pub fn expect(&self, peer: usize) {
        self.set(peer, true);
    }

    /// The part of `peer` has come.
    pub fn arrived(&self, peer: usize) {
        self.set(peer, false);
    }

    /// Who is waited for now.
    pub fn ranks(&self) -> Vec<usize> {
        let awaited = |(rank, awaited): (usize, &AtomicBool)| awaited.load(Ordering::Relaxed).then_some(rank);
        self.0.iter().enumerate().filter_map(awaited).collect()
    }

    fn set(&self, peer: usize, awaited: bool) {
        if let Some(flag) = self.0.get(peer) {
            flag.store(awaited, Ordering::Relaxed);
        }
    }
}

/// A collective under way on this rank.
#[derive(Clone, Debug)]
pub struct Call {
    /// What all ranks must have called alike.
    pub info: CallInfo,
    /// This rank.
    pub rank: usize,
    /// This rank's weight; 1 where weights have no meaning.
    pub weight: f64,
    /// The number of this call's next exchange: each exchange of a call has its own.
    pub stage: u8,
    /// When it began.
    pub started: Instant,
    /// When it must be done.
    pub deadline: Instant,
    /// How long that was from the start.
    pub timeout: Duration,
    /// Whom it waits for, if somebody wants to know. Exchanges keep it up to date.
    pub awaited: Option<Arc<Awaited>>,
}

impl Call {
    /// A call made now.
    pub fn new(info: CallInfo, rank: usize, timeout: Duration) -> Call {
        let now = Instant::now();
        // A timeout beyond what `Instant` can express means "never"; a century will do.
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        Call {
            info,
            rank,
            weight: 1.0,
            stage: 0,
            started: now,
            deadline: now.checked_add(timeout).unwrap_or_else(|| now + century),
            timeout,
            awaited: None,
        }
    }

    /// Notes that the exchange waits for `peer`.
    pub fn expect(&self, peer: usize) {
        if let Some(awaited) = &self.awaited {
            awaited.expect(peer);
        }
    }

    /// Notes that the part of `peer` has come.
    pub fn arrived(&self, peer: usize) {
        if let Some(awaited) = &self.awaited {
            awaited.arrived(peer);
        }
    }

    /// The header of this rank's next frame.
    pub fn header(&self, payload_bytes: usize) -> Header {
        Header {
            info: self.info.clone(),
            from: self.rank,
            stage: self.stage,
            weight: self.weight,
            payload_bytes: payload_bytes as u64,
        }
    }

    /// Checks the header of a frame from `peer`, from which `payload_bytes` are expected.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the peer is in another call, [`Error::Protocol`] if it is in the same call but sends what
    /// this call cannot have.
    pub fn check_header(&self, peer: usize, header: &Header, payload_bytes: usize) -> Result<()> {
        if !self.info.differences(&header.info).is_empty() {
            let mine = Box::new(RankCall { rank: self.rank, call: self.info.clone() });
            let theirs = Box::new(RankCall { rank: peer, call: header.info.clone() });
            let (first, second) = if self.rank < peer { (mine, theirs) } else { (theirs, mine) };
            return Err(Error::Mismatch { first, second });
        }
        let expected = (peer, self.stage, payload_bytes as u64);
        let got = (header.from, header.stage, header.payload_bytes);
        if expected != got {
            return Err(Error::Protocol {
                peer,
                message: format!(
                    "a frame of rank {}, stage {}, {} bytes, expected rank {}, stage {}, {} bytes",
                    got.0, got.1, got.2, expected.0, expected.1, expected.2
                ),
                during: Some(Box::new(self.info.clone())),
            });
        }
        Ok(())
    }

    /// The error when the deadline passes before the parts of `waiting_for` have come.
    pub fn timed_out(&self, waiting_for: Vec<usize>) -> Error {
        Error::Timeout {
            reporter: self.rank,
            waiting_for,
            culprit: None,
            timeout: self.timeout,
            call: Box::new(self.info.clone()),
            why: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce() -> CallInfo {
        CallInfo {
            collective: Collective::AllReduce,
            reduce: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            len_elems: 1000,
            root: None,
            tag: 0,
            group: 1,
            sequence: 57,
            site: "src/main.rs:10:5".into(),
            step: None,
        }
    }

    #[test]
    fn a_call_is_shown_as_people_say_it() {
        let text = "all_reduce #57 of group 1 (f32, sum, 1000 elements) called at src/main.rs:10:5";
        assert_eq!(all_reduce().to_string(), text);
        let tagged = CallInfo { tag: 31, len_elems: 1, ..all_reduce() };
        assert!(tagged.to_string().contains("(f32, sum, 1 element, tag 0x1f)"), "{tagged}");
        let stepped =
            CallInfo { step: Some(28), collective: Collective::NewGroup, dtype: None, reduce: None, ..all_reduce() };
        assert_eq!(stepped.to_string(), "World::group (group 1) in step 28 called at src/main.rs:10:5");
    }

    #[test]
    fn everything_but_the_site_and_the_step_is_compared() {
        let call = all_reduce();
        assert!(call.differences(&CallInfo { site: "b.rs:1:1".into(), step: Some(3), ..call.clone() }).is_empty());
        for (name, other) in [
            ("collectives", CallInfo { collective: Collective::Broadcast, ..call.clone() }),
            ("groups", CallInfo { group: 2, ..call.clone() }),
            ("sequence numbers", CallInfo { sequence: 58, ..call.clone() }),
            ("reduce ops", CallInfo { reduce: Some(ReduceOp::Mean), ..call.clone() }),
            ("dtypes", CallInfo { dtype: Some(DType::F64), ..call.clone() }),
            ("lengths", CallInfo { len_elems: 999, ..call.clone() }),
            ("roots", CallInfo { root: Some(0), ..call.clone() }),
            ("tags", CallInfo { tag: 1, ..call.clone() }),
        ] {
            assert_eq!(call.differences(&other), [name]);
        }
    }

    #[test]
    fn a_frame_of_another_stage_rank_or_size_is_refused() {
        let mine = Call::new(all_reduce(), 0, Duration::from_secs(1));
        let theirs = Call { rank: 1, ..mine.clone() };
        assert_eq!(mine.check_header(1, &theirs.header(40), 40), Ok(()));
        let later = Call { stage: 1, ..theirs.clone() };
        for result in [
            mine.check_header(1, &later.header(40), 40),
            mine.check_header(2, &theirs.header(40), 40),
            mine.check_header(1, &theirs.header(41), 40),
        ] {
            assert!(matches!(result, Err(Error::Protocol { .. })), "{result:?}");
        }
    }

    #[test]
    fn an_endless_timeout_does_not_overflow() {
        let call = Call::new(all_reduce(), 0, Duration::MAX);
        assert!(call.deadline > Instant::now() + Duration::from_secs(1_000_000));
    }
}
