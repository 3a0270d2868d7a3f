//! The machine: cores, caches, programs, CPU time and memory of processes.

use std::fs;
use std::path::{Path, PathBuf};

/// Number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes of the largest cache; a common size if the system does not report it.
pub(crate) fn last_level_cache_bytes() -> usize {
    let size = |index: u32| -> Option<usize> {
        let text = fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok()?;
        Some(text.trim().strip_suffix('K')?.parse::<usize>().ok()? * 1024)
    };
    (0..8).filter_map(size).max().unwrap_or(32 << 20)
}

/// Processor, cores and cache in one line.
pub(crate) fn describe() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let model = model.unwrap_or("unknown processor").split_whitespace().collect::<Vec<_>>().join(" ");
    format!("{model}, {} cores, {} MiB cache", cores(), last_level_cache_bytes() >> 20)
}

/// The program `name` in `PATH`, or the file `name` if it is a path.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir: PathBuf| dir.join(name)).find(|path: &PathBuf| is_program(path))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// CPU time in nanoseconds of the calling thread, or of all live threads of this process.
pub(crate) fn cpu_ns(of: Cpu) -> u64 {
    let read = |path: &Path| -> u64 {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    match of {
        Cpu::Thread => read(Path::new("/proc/thread-self/schedstat")),
        Cpu::Process => match fs::read_dir("/proc/self/task") {
            Ok(tasks) => tasks.flatten().map(|task| read(&task.path().join("schedstat"))).sum(),
            Err(_) => 0,
        },
    }
}

/// Threads whose CPU time is read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cpu {
    /// The calling thread.
    Thread,
    /// All threads of this process.
    Process,
}

/// Resources that a process has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Resident memory, including memory shared with other processes.
    pub(crate) rss_bytes: u64,
    /// Resident memory, with shared memory divided among the processes that share it.
    pub(crate) pss_bytes: u64,
    /// Page faults so far.
    pub(crate) faults: u64,
}

impl Usage {
    /// Usage of this process; 0 for numbers that the system does not report.
    pub(crate) fn here() -> Usage {
        let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
        let kib = |name: &str| -> u64 {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        // The program's name, in parentheses, may contain spaces; minor faults are the eighth field behind it.
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let faults = fields.split_whitespace().nth(7).and_then(|number| number.parse().ok()).unwrap_or(0);
        Usage { rss_bytes: kib("Rss:") * 1024, pss_bytes: kib("Pss:") * 1024, faults }
    }

    /// The answer to `usage` in the [`driver_protocol`](crate::driver_protocol).
    pub(crate) fn line(&self) -> String {
        format!("ok {} {} {}", self.rss_bytes, self.pss_bytes, self.faults)
    }

    /// Parses [`line`](Self::line).
    pub(crate) fn parse(answer: &str) -> Option<Usage> {
        let mut numbers = answer.split_whitespace().skip(1).map(|number| number.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(Usage { rss_bytes: next()?, pss_bytes: next()?, faults: next()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_seen_and_said() {
        let before = Usage::here();
        let memory = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = Usage::here();
        assert!(
            after.rss_bytes >= before.rss_bytes + (60 << 20) && after.faults > before.faults,
            "{before:?} {after:?}"
        );
        drop(memory);
        assert_eq!(Usage::parse(&after.line()), Some(after));
        assert!(cpu_ns(Cpu::Process) > 0 || !std::path::Path::new("/proc/self/schedstat").exists());
    }
}
