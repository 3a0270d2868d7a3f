//! Parsers of bytes from other launchers and from disk, for the targets in `fuzz/`. Each takes any bytes; a panic is a
//! finding.
#![allow(missing_docs)]

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::event::Stop;
use crate::node_outcome::NodeOutcome;
use crate::nodes::{GenerationPlan, Node, Verdict};
use crate::preemption::Preemption;
use crate::report::outcome::Outcome;
use crate::report::report_files;

/// Parses `bytes` as each kind of JSON that launchers send each other or write to files, and uses the values.
pub fn launcher(bytes: &[u8]) {
    let node: Option<Node> = parse(bytes);
    drop(node);
    if let Some(plan) = parse::<GenerationPlan>(bytes) {
        let ranks = plan.world_size();
        let firsts: Vec<_> = (0..plan.nodes.len()).map(|node| plan.first_rank(node)).collect();
        assert!(firsts.is_sorted() && firsts.iter().all(|first| *first <= ranks));
        plan.node_of(0);
        plan.node_of(usize::MAX);
    }
    let stop: Option<Stop> = parse(bytes);
    drop(stop);
    if let Some(nodes) = parse::<Vec<NodeOutcome>>(bytes) {
        for first in [None, Some(0)] {
            let _ = Outcome::of(&nodes, u32::MAX, first, &Preemption::new()).to_string();
        }
    }
    if let Some(verdict) = parse::<Verdict>(bytes) {
        let _ = verdict.outcome.to_string();
    }
    report_files::fuzz(bytes);
}

/// Parses `bytes` as a hostfile, and as a line between the launcher at the terminal and the one on a host.
pub fn hosts(bytes: &[u8]) {
    crate::hosts::fuzz(bytes);
}

/// Parses a value; panics if the value, written again, cannot be parsed.
pub(crate) fn parse<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> Option<T> {
    let value: T = serde_json::from_slice(bytes).ok()?;
    let again = serde_json::to_vec(&value).expect("what we parse, we write");
    assert!(serde_json::from_slice::<T>(&again).is_ok(), "what we write, we parse");
    Some(value)
}
