//! Shares of a machine's cores; pure functions.

use super::machine_cores::Core;

/// Processors of each of `ranks`: equal shares of whole physical cores, in the order of `cores`; equal shares of
/// hardware threads if there are fewer cores than ranks. Every share lies within one NUMA node if all shares can.
/// `None` if there are fewer hardware threads than ranks.
pub(super) fn by_core(cores: &[Core], ranks: usize) -> Option<Vec<Vec<u16>>> {
    let mut units = cores.to_vec();
    if cores.len() < ranks {
        // The first threads of all cores come before the second threads, so that every core has a rank before one has
        // two.
        let mut threads: Vec<(usize, usize, u16)> = Vec::new();
        for core in cores {
            threads.extend(core.processors.iter().enumerate().map(|(nth, processor)| (nth, core.node, *processor)));
        }
        threads.sort_unstable();
        let unit = |(_, node, processor)| Core { node, processors: vec![processor] };
        units = threads.into_iter().map(unit).collect();
    }
    let each = units.len() / ranks;
    if each == 0 {
        return None;
    }
    let of_nodes: Vec<&[Core]> = units.chunk_by(|one, next| one.node == next.node).collect();
    let whole: Vec<&[Core]> = of_nodes.iter().flat_map(|node| node.chunks_exact(each)).collect();
    let shares = if whole.len() < ranks { units.chunks_exact(each).collect() } else { whole };
    Some(shares.into_iter().take(ranks).map(processors).collect())
}

/// Processors of each of `ranks`: all processors of one NUMA node. Consecutive ranks share a node. `None` if there are
/// no cores.
pub(super) fn by_node(cores: &[Core], ranks: usize) -> Option<Vec<Vec<u16>>> {
    let nodes: Vec<&[Core]> = cores.chunk_by(|one, next| one.node == next.node).collect();
    (0..ranks).map(|rank| nodes.get(rank * nodes.len() / ranks).map(|node| processors(node))).collect()
}

fn processors(cores: &[Core]) -> Vec<u16> {
    let mut all: Vec<u16> = cores.iter().flat_map(|core| core.processors.iter().copied()).collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of so many cores each, with so many threads: processor `n`'s siblings are `n + cores`, `n + 2 * cores`.
    fn machine(nodes: &[usize], threads: usize) -> Vec<Core> {
        let count: usize = nodes.iter().sum();
        let of_nodes = nodes.iter().enumerate().flat_map(|(node, cores)| std::iter::repeat_n(node, *cores));
        let core = |(first, node): (usize, usize)| Core {
            node,
            processors: (0..threads).map(|nth| (first + nth * count) as u16).collect(),
        };
        of_nodes.enumerate().map(core).collect()
    }

    #[test]
    fn shares_are_whole_cores_within_a_node() {
        assert_eq!(by_core(&machine(&[4], 1), 2).unwrap(), [[0, 1], [2, 3]]);
        assert_eq!(by_core(&machine(&[2, 2], 2), 2).unwrap(), [[0, 1, 4, 5], [2, 3, 6, 7]]);
        // One core of each node is left over.
        assert_eq!(by_core(&machine(&[3, 3], 1), 2).unwrap(), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(by_core(&machine(&[5, 5], 1), 4).unwrap(), [[0, 1], [2, 3], [5, 6], [7, 8]]);
        // Where shares do not fit in nodes, one lies on two.
        assert_eq!(by_core(&machine(&[3, 3], 1), 3).unwrap(), [[0, 1], [2, 3], [4, 5]]);
        assert_eq!(by_core(&machine(&[2, 2], 1), 1).unwrap(), [[0, 1, 2, 3]]);
    }

    #[test]
    fn more_ranks_than_cores_get_hardware_threads() {
        // Every core has a rank before one has two.
        assert_eq!(by_core(&machine(&[2, 1], 2), 4).unwrap(), [[0], [1], [2], [3]]);
        assert_eq!(by_core(&machine(&[2], 2), 4).unwrap(), [[0], [1], [2], [3]]);
        assert_eq!(by_core(&machine(&[2], 2), 5), None);
        assert_eq!(by_core(&[], 1), None);
    }

    #[test]
    fn shares_never_overlap_and_are_of_one_size() {
        for nodes in [&[1][..], &[4], &[3, 5], &[8, 8], &[1, 2, 3, 4]] {
            for threads in 1..=4 {
                let cores = machine(nodes, threads);
                for ranks in 1..=cores.len() * threads {
                    let shares = by_core(&cores, ranks).unwrap();
                    assert_eq!(shares.len(), ranks, "{nodes:?} {threads}");
                    assert!(shares.iter().all(|share| share.len() == shares[0].len()), "{shares:?}");
                    let mut all = shares.concat();
                    all.sort_unstable();
                    all.dedup();
                    assert_eq!(all.len(), ranks * shares[0].len(), "{shares:?}");
                }
                assert_eq!(by_core(&cores, cores.len() * threads + 1), None);
            }
        }
    }

    #[test]
    fn nodes_are_dealt_out_in_blocks() {
        let cores = machine(&[2, 2], 1);
        assert_eq!(by_node(&cores, 1).unwrap(), [[0, 1]]);
        assert_eq!(by_node(&cores, 4).unwrap(), [[0, 1], [0, 1], [2, 3], [2, 3]]);
        assert_eq!(by_node(&cores, 3).unwrap(), [[0, 1], [0, 1], [2, 3]]);
        assert_eq!(by_node(&[], 1), None);
    }
}
