//! Parsers of lists in Slurm's notation.

use super::names::SLURM_STEP;
use super::parse::{Lookup, number};
use crate::{Error, Result};

/// Smallest number of a step that `srun` did not start: the batch script, an interactive shell and the like.
const FIRST_SPECIAL_STEP: u64 = 0xffff_fff0;

/// True if `srun` started this process.
pub(super) fn in_step(lookup: Lookup<'_>) -> bool {
    match number::<u64>(SLURM_STEP, lookup) {
        Ok(Some(step)) => step < FIRST_SPECIAL_STEP,
        Ok(None) => false,
        Err(_) => true, // the parse error is returned when the rank's variables are read
    }
}

/// Number of tasks on machine number `node`: an entry of the list in variable `name`, such as `2(x3),1`.
pub(super) fn tasks_on(node: usize, name: &str, lookup: Lookup<'_>) -> Result<Option<usize>> {
    let Some(list) = lookup(name) else { return Ok(None) };
    nth(&list, node).map(Some).ok_or_else(|| {
        Error::environment(format!(
            "{name}={list:?} does not say how many tasks run on machine {node} (a list such as 2(x3),1)"
        ))
    })
}

fn nth(list: &str, mut node: usize) -> Option<usize> {
    for entry in list.trim().split(',') {
        let (tasks, machines) = match entry.split_once("(x") {
            Some((tasks, machines)) => (tasks, machines.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1),
        };
        if node < machines {
            return tasks.parse().ok();
        }
        node -= machines;
    }
    None
}

/// First machine of a list such as `node[01-03,07],gpu5`.
pub(super) fn first_machine(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim();
    loop {
        let plain = rest.find([',', '[']).unwrap_or(rest.len());
        name.push_str(&rest[..plain]);
        if !rest[plain..].starts_with('[') {
            return (!name.is_empty() && !name.contains(['[', ']'])).then_some(name);
        }
        let (range, after) = rest[plain + 1..].split_once(']')?;
        let first = range.split([',', '-']).next().filter(|first| !first.is_empty())?;
        name.push_str(first);
        rest = after;
    }
}

#[cfg(feature = "fuzzing")]
pub(super) fn fuzz(bytes: &[u8]) {
    let Ok(list) = str::from_utf8(bytes) else { return };
    for node in [0, 1, 1000, usize::MAX] {
        nth(list, node);
    }
    if let Some(name) = first_machine(list) {
        assert!(!name.is_empty() && !name.contains(['[', ']', ',']), "{name:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_machine_of_a_list() {
        for (list, first) in [
            ("vm", "vm"),
            ("node1,node2", "node1"),
            ("node[01-03,07],gpu5", "node01"),
            ("node[7,9]", "node7"),
            ("rack[1-2]n[3-4].local", "rack1n3.local"),
        ] {
            assert_eq!(first_machine(list).as_deref(), Some(first), "{list}");
        }
        for junk in ["", "node[", "node[]", ",", "node]1", "node[[1]"] {
            assert_eq!(first_machine(junk), None, "{junk}");
        }
    }

    #[test]
    fn tasks_by_machine() {
        let list = "2(x3),1,4(x2)";
        let tasks: Vec<_> = (0..7).map(|node| nth(list, node)).collect();
        assert_eq!(tasks, [Some(2), Some(2), Some(2), Some(1), Some(4), Some(4), None]);
        for junk in ["", "x", "2(x", "2(x3", "2(y3)", "-1"] {
            assert_eq!(nth(junk, 0), None, "{junk}");
        }
    }
}
