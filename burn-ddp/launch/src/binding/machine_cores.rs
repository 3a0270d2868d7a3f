//! Processors of this machine: physical cores and NUMA nodes, read from `/sys/devices/system`.

use std::fs;
use std::path::Path;

/// A physical core, as far as this process may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Core {
    /// Number of its NUMA node.
    pub(super) node: usize,
    /// Numbers of its hardware threads, ascending. Linux calls them processors.
    pub(super) processors: Vec<u16>,
}

/// Processors on which the calling thread may run, ascending: by its affinity, which the cpuset of its control group
/// limits.
#[cfg(target_os = "linux")]
pub(super) fn of_this_process() -> Result<Vec<u16>, String> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let set = sched_getaffinity(None).map_err(|e| format!("cannot read which cores this process may use: {e}"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).map(|processor| processor as u16).collect())
}

#[cfg(not(target_os = "linux"))]
pub(super) fn of_this_process() -> Result<Vec<u16>, String> {
    Err("ranks can be bound to cores on Linux only; leave --bind-to out".into())
}

/// The cores of `processors`, ordered by node and number. A processor without an entry in `sys` counts as a core of its
/// own on node 0.
pub(super) fn list(sys: &Path, processors: &[u16]) -> Vec<Core> {
    let read = |path: String| parse_list(&fs::read_to_string(sys.join(path)).unwrap_or_default());
    let nodes: Vec<(usize, Vec<u16>)> = read("node/online".into())
        .into_iter()
        .map(|node| (node.into(), read(format!("node/node{node}/cpulist"))))
        .collect();
    let mut cores: Vec<Core> = Vec::new();
    for processor in processors {
        if cores.iter().any(|core| core.processors.contains(processor)) {
            continue;
        }
        let topology = format!("cpu/cpu{processor}/topology");
        // Older kernels have only the second name.
        let names = ["core_cpus_list", "thread_siblings_list"];
        let together = names.iter().map(|name| read(format!("{topology}/{name}"))).find(|list| !list.is_empty());
        let mut own: Vec<u16> = together.unwrap_or_default();
        own.retain(|sibling| processors.contains(sibling));
        if !own.contains(processor) {
            own = vec![*processor];
        }
        let node = nodes.iter().find(|(_, of_node)| of_node.contains(processor)).map_or(0, |(node, _)| *node);
        cores.push(Core { node, processors: own });
    }
    cores.sort_by_key(|core| (core.node, core.processors[0]));
    cores
}

/// Numbers of a list such as `0-3,8`; parts that cannot be parsed are left out.
fn parse_list(text: &str) -> Vec<u16> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u16>().ok()?..=last.parse::<u16>().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// Text of a list of cores, such as `0-3,8`; `numbers` ascend.
pub(super) fn list_text(numbers: &[u16]) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*number) => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let text = |(first, last): &(u16, u16)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_as_the_kernel_does() {
        for text in ["0", "0-3", "0-3,8", "1,3,5-7"] {
            assert_eq!(list_text(&parse_list(&format!("{text}\n"))), text);
        }
        assert_eq!(parse_list("\n"), [0_u16; 0]);
        assert_eq!(parse_list("x,2"), [2]);
    }

    #[test]
    fn cores_are_found_with_their_threads_and_nodes() {
        let sys = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        // Two nodes of two cores with two threads each; processors are numbered as on most servers.
        write("node/online", "0-1");
        write("node/node0/cpulist", "0-1,4-5");
        write("node/node1/cpulist", "2-3,6-7");
        for first in 0..4 {
            for processor in [first, first + 4] {
                let name = if first == 3 { "thread_siblings_list" } else { "core_cpus_list" };
                write(&format!("cpu/cpu{processor}/topology/{name}"), &format!("{first},{}", first + 4));
            }
        }
        let core = |node, processors: &[u16]| Core { node, processors: processors.to_vec() };
        let all: Vec<u16> = (0..8).collect();
        let expected = [core(0, &[0, 4]), core(0, &[1, 5]), core(1, &[2, 6]), core(1, &[3, 7])];
        assert_eq!(list(sys.path(), &all), expected);
        // Processors that may not be used are left out.
        assert_eq!(list(sys.path(), &[1, 3, 7]), [core(0, &[1]), core(1, &[3, 7])]);
        // A system that says nothing.
        let nothing = tempfile::tempdir().unwrap();
        assert_eq!(list(nothing.path(), &[3, 5]), [core(0, &[3]), core(0, &[5])]);
    }
}
