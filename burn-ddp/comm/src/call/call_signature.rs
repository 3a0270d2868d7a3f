//! Signature of a call: the fields that ranks compare.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{CallSite, Collective};
use crate::tensor_type::Shape;
use crate::{DType, ReduceOp};

/// Signature of a call, with its line and its step. All fields except line and step must be the same on all ranks; in a
/// call between two ranks, the two sides must fit together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallInfo {
    /// Kind of the call.
    pub collective: Collective,
    /// Reduce op, for collectives that reduce.
    pub reduce: Option<ReduceOp>,
    /// Type of the elements, for collectives that carry elements.
    pub dtype: Option<DType>,
    /// Number of elements that each rank passes; for `reduce_scatter`, `scatter` and `recv`, that each rank gets.
    pub len_elems: u64,
    /// The root's world rank, for collectives with a root; the other rank's, for a call between two ranks.
    pub root: Option<usize>,
    /// A tag that the caller chooses, such as a number of a bucket and step; 0 if there is none. For a `send_recv` with
    /// one other rank, the number of elements that it has room for.
    pub tag: u64,
    /// Hash of arguments that have no field of their own: lengths of shared buffers, rows of a divided tensor, weights
    /// of its reduction, and whether the elements are in a device's memory; 0 if there are none. Calls with a root have
    /// none.
    pub digest: u32,
    /// Shape of the tensor that a rank passes, for collectives on tensors; that each rank gets, for `scatter` and
    /// `recv`.
    pub shape: Option<Shape>,
    /// The group's number in its world, shown by [`GroupId`].
    pub group: u64,
    /// Number of earlier calls on this group; for a call between two ranks, number of earlier calls between these two.
    pub sequence: u64,
    /// Line of the call. Errors show it; ranks do not compare it.
    pub site: CallSite,
    /// Training step, if the program sets it; see [`World::set_step`](crate::World::set_step). Not compared.
    pub step: Option<u64>,
}

impl CallInfo {
    /// A call without elements, outside of any step.
    pub fn bare(collective: Collective, group: u64, sequence: u64, site: impl Into<CallSite>) -> CallInfo {
        CallInfo {
            collective,
            reduce: None,
            dtype: None,
            len_elems: 0,
            root: None,
            tag: 0,
            digest: 0,
            shape: None,
            group,
            sequence,
            site: site.into(),
            step: None,
        }
    }

    /// Place among the calls that all ranks of the group make: 1 for making the group, then 2, 3 and so on. `None` for
    /// calls between two ranks.
    pub fn place(&self) -> Option<u64> {
        match self.collective {
            Collective::NewGroup => Some(1),
            collective if collective.counterpart().is_some() => None,
            _ => Some(self.sequence + 2),
        }
    }

    /// True if a peer's call fits this one.
    pub fn agrees(&self, other: &CallInfo) -> bool {
        let mut agrees = true;
        self.compare(other, |differs, _| agrees &= !differs);
        agrees
    }

    /// Names of the fields that differ from a peer's call.
    pub fn differences(&self, other: &CallInfo) -> Vec<&'static str> {
        let mut names = Vec::new();
        self.compare(other, |differs, name| {
            if differs {
                names.push(name);
            }
        });
        names
    }

    fn compare(&self, other: &CallInfo, mut report: impl FnMut(bool, &'static str)) {
        let fit = other.collective == self.collective.counterpart().unwrap_or(self.collective);
        report(!fit, "collectives");
        report(self.group != other.group, "groups");
        let (mine, theirs) = (self.collective.counterpart(), other.collective.counterpart());
        // Collectives and calls between two ranks have separate sequence numbers.
        report(mine.is_some() == theirs.is_some() && self.sequence != other.sequence, "sequence numbers");
        if !fit {
            return;
        }
        report(self.reduce != other.reduce, "reduce ops");
        report(self.dtype != other.dtype, "dtypes");
        if self.collective == Collective::SendRecv {
            report(self.len_elems != other.tag || self.tag != other.len_elems, "lengths");
            return;
        }
        report(self.len_elems != other.len_elems, "lengths");
        report(self.shape != other.shape, "shapes");
        report(self.tag != other.tag, "tags");
        let hashed = match self.collective {
            Collective::SharedBuffers => "lengths of buffers",
            Collective::ReduceScatter => "rows, weights or memories (host or device)",
            Collective::AllGather => "rows or memories (host or device)",
            _ => "memories (host or device)",
        };
        report(self.digest != other.digest, hashed);
        // In a call between two ranks, each names the other.
        report(mine.is_none() && self.root != other.root, "roots");
    }

    /// The call without line and step: `all_reduce (f32, sum, 10 elements)`.
    pub fn operation(&self) -> String {
        format!("{}{}{}", self.collective, self.partner(), self.details())
    }

    /// ` to rank 2` for calls between two ranks.
    fn partner(&self) -> String {
        let preposition = match self.collective {
            Collective::Send => "to",
            Collective::Recv => "from",
            Collective::SendRecv => "with",
            _ => return String::new(),
        };
        self.root.map(|rank| format!(" {preposition} rank {rank}")).unwrap_or_default()
    }

    fn details(&self) -> String {
        let mut details = Vec::new();
        if let Some(dtype) = self.dtype {
            details.push(dtype.to_string());
        }
        if let Some(reduce) = self.reduce {
            details.push(reduce.to_string());
        }
        if let Some(root) = self.root.filter(|_| self.collective.counterpart().is_none()) {
            details.push(format!("root {root}"));
        }
        if self.dtype.is_some() {
            let plural = if self.len_elems == 1 { "" } else { "s" };
            details.push(format!("{} element{plural}", self.len_elems));
        }
        if let Some(shape) = self.shape {
            details.push(format!("shape {shape}"));
        }
        if self.collective == Collective::SendRecv {
            details.push(format!("room for {}", self.tag));
        } else if self.tag != 0 {
            details.push(format!("tag {:#x}", self.tag));
        }
        if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) }
    }
}

impl fmt::Display for CallInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = GroupId(self.group);
        if self.collective == Collective::NewGroup {
            let maker = if group.is_sub_group() { "ProcessGroup::split" } else { "World::group" };
            write!(f, "{maker} (group {group})")?;
        } else {
            let (partner, details) = (self.partner(), self.details());
            // A user who wrapped a model has not called `all_reduce_weighted`, so the message says what it is for.
            let reduces = matches!(self.collective, Collective::AllReduceWeighted | Collective::AllReduceLeaves);
            if reduces && self.site.is_wrapped() {
                f.write_str("the reduction of gradients, ")?;
            }
            write!(f, "{} #{}{partner} of group {group}{details}", self.collective, self.sequence)?;
        }
        if let Some(step) = self.step {
            write!(f, " in step {step}")?;
        }
        write!(f, " {}", self.site.clause())
    }
}

/// A group's number as errors show it: `3` is the third group of all ranks; `2.1` is the sub-group with world rank 2
/// as its first member, from that rank's first call of `split`. No two groups of a world have the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub u64);

impl GroupId {
    /// The sub-group with this `number` whose first rank is the world rank `leader`. Numbers count from 1.
    pub fn led_by(leader: usize, number: u32) -> GroupId {
        GroupId((leader as u64 + 1) << 32 | u64::from(number))
    }

    /// True if the group was made by [`split`](crate::ProcessGroup::split).
    pub fn is_sub_group(self) -> bool {
        self.0 >> 32 != 0
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >> 32 {
            0 => write!(f, "{}", self.0),
            leader => write!(f, "{}.{}", leader - 1, self.0 as u32),
        }
    }
}

/// A call and the rank that made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCall {
    /// The caller's rank in the world.
    pub rank: usize,
    /// Its call.
    pub call: CallInfo,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::Location;

    fn all_reduce() -> CallInfo {
        CallInfo {
            reduce: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            len_elems: 1000,
            ..CallInfo::bare(Collective::AllReduce, 1, 57, "src/main.rs:10:5")
        }
    }

    fn send() -> CallInfo {
        CallInfo { collective: Collective::Send, reduce: None, root: Some(2), len_elems: 3, ..all_reduce() }
    }

    #[test]
    fn a_call_is_shown_as_people_say_it() {
        let text = "all_reduce #57 of group 1 (f32, sum, 1000 elements) called at src/main.rs:10:5";
        assert_eq!(all_reduce().to_string(), text);
        let tagged = CallInfo { tag: 31, len_elems: 1, ..all_reduce() };
        assert!(tagged.to_string().contains("(f32, sum, 1 element, tag 0x1f)"), "{tagged}");
        let shaped = CallInfo { shape: Some(Shape::of(&[10, 100])), ..all_reduce() };
        assert_eq!(shaped.operation(), "all_reduce (f32, sum, 1000 elements, shape [10, 100])");
        let stepped = CallInfo { step: Some(28), ..CallInfo::bare(Collective::NewGroup, 1, 0, "a.rs:1:1") };
        assert_eq!(stepped.to_string(), "World::group (group 1) in step 28 called at a.rs:1:1");
        let of_a_part = CallInfo { group: GroupId::led_by(2, 5).0, ..stepped };
        assert_eq!(of_a_part.to_string(), "ProcessGroup::split (group 2.5) in step 28 called at a.rs:1:1");
        let line = Location::caller();
        let of_a_model = CallInfo { site: CallSite::Wrapped(line), ..all_reduce() };
        let text = format!("all_reduce #57 of group 1 (f32, sum, 1000 elements) of the model wrapped at {line}");
        assert_eq!(of_a_model.to_string(), text);
        let of_gradients = CallInfo { collective: Collective::AllReduceWeighted, ..of_a_model.clone() };
        assert!(of_gradients.to_string().starts_with("the reduction of gradients, all_reduce_weighted #57 of group 1"));
        let at_a_peer = CallInfo { site: of_a_model.site.to_string().as_str().into(), ..all_reduce() };
        assert_eq!(at_a_peer.to_string(), text, "after its way over the wire");
        let text = "send #57 to rank 2 of group 1 (f32, 3 elements) called at src/main.rs:10:5";
        assert_eq!(send().to_string(), text);
        assert_eq!(
            CallInfo { collective: Collective::Recv, ..send() }.operation(),
            "recv from rank 2 (f32, 3 elements)"
        );
        let swap = CallInfo { collective: Collective::SendRecv, tag: 4, ..send() };
        assert_eq!(swap.operation(), "send_recv with rank 2 (f32, 3 elements, room for 4)");
    }

    #[test]
    fn everything_but_the_site_and_the_step_is_compared() {
        let call = all_reduce();
        let elsewhere = CallInfo { site: "b.rs:1:1".into(), step: Some(3), ..call.clone() };
        assert!(call.differences(&elsewhere).is_empty() && call.agrees(&elsewhere));
        for (name, other) in [
            ("collectives", CallInfo { collective: Collective::Broadcast, ..call.clone() }),
            ("groups", CallInfo { group: 2, ..call.clone() }),
            ("sequence numbers", CallInfo { sequence: 58, ..call.clone() }),
            ("reduce ops", CallInfo { reduce: Some(ReduceOp::Mean), ..call.clone() }),
            ("dtypes", CallInfo { dtype: Some(DType::F64), ..call.clone() }),
            ("lengths", CallInfo { len_elems: 999, ..call.clone() }),
            ("shapes", CallInfo { shape: Some(Shape::of(&[10, 100])), ..call.clone() }),
            ("roots", CallInfo { root: Some(0), ..call.clone() }),
            ("tags", CallInfo { tag: 1, ..call.clone() }),
            ("memories (host or device)", CallInfo { digest: 1, ..call.clone() }),
        ] {
            assert_eq!(call.differences(&other), [name]);
            assert!(!call.agrees(&other));
        }
    }

    #[test]
    fn two_sides_of_a_transfer_fit_together() {
        let recv = CallInfo { collective: Collective::Recv, root: Some(0), ..send() };
        assert!(send().agrees(&recv) && recv.agrees(&send()));
        assert_eq!(send().differences(&send()), ["collectives"], "both send");
        assert_eq!(send().differences(&all_reduce()), ["collectives"]);
        assert_eq!(send().differences(&CallInfo { len_elems: 4, ..recv.clone() }), ["lengths"]);
        assert_eq!(send().differences(&CallInfo { shape: Some(Shape::of(&[3])), ..recv.clone() }), ["shapes"]);
        assert_eq!(send().differences(&CallInfo { dtype: Some(DType::I32), ..recv.clone() }), ["dtypes"]);
        assert_eq!(send().differences(&CallInfo { sequence: 58, ..recv.clone() }), ["sequence numbers"]);
        let swap = |out, room| CallInfo { collective: Collective::SendRecv, len_elems: out, tag: room, ..send() };
        assert!(swap(3, 4).agrees(&swap(4, 3)));
        assert_eq!(swap(3, 4).differences(&swap(3, 4)), ["lengths"]);
        assert_eq!(swap(3, 3).differences(&recv), ["collectives"]);
    }

    #[test]
    fn groups_have_short_names() {
        assert_eq!(GroupId(7).to_string(), "7");
        assert_eq!(GroupId::led_by(0, 1).to_string(), "0.1");
        assert_eq!(GroupId::led_by(30, u32::MAX).to_string(), "30.4294967295");
        assert!(GroupId::led_by(0, 1).is_sub_group() && !GroupId(7).is_sub_group());
    }
}
