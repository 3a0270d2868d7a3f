//! Memory that this process may still take: of the machine, and within the limits of its control groups, which
//! containers and batch systems set.
//!
//! If a control group exceeds its limit, the kernel kills one of its processes, so this limit is read before memory is
//! taken. Page cache counts as spare: the kernel drops it first. Swap does not: shared memory there would be slow.

use std::fmt;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Bytes to spare, and what limits them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spare {
    pub(super) bytes: u64,
    of: Limited,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Limited {
    Machine,
    Group { directory: PathBuf, limit: u64 },
}

impl fmt::Display for Spare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.bytes;
        match &self.of {
            Limited::Machine => write!(f, "the machine has {bytes} bytes to spare"),
            Limited::Group { directory, limit } => {
                write!(f, "the control group {} allows {limit} bytes, of which {bytes} are left", directory.display())
            }
        }
    }
}

/// Memory that the tightest limit leaves to this process; `None` if the system does not say.
pub(super) fn spare() -> Option<Spare> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let meminfo = read("/proc/meminfo");
    let machine = bytes_of(&meminfo, "MemAvailable:").map(|bytes| Spare { bytes, of: Limited::Machine });
    // A limit of all of the machine's memory never leaves less than the machine has.
    let total = bytes_of(&meminfo, "MemTotal:").unwrap_or(u64::MAX);
    let groups = group_directories(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    let groups = groups.iter().filter_map(|(version, directory)| spare_of_group(*version, directory, total));
    machine.into_iter().chain(groups).min_by_key(|spare| spare.bytes)
}

/// Bytes by the line of `/proc/meminfo` that begins with `key`.
fn bytes_of(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// Files with limits in bytes, the file with the bytes in use, and the keys of page cache in `memory.stat`.
    fn names(self) -> (&'static [&'static str], &'static str, [&'static str; 2]) {
        match self {
            // The `total_` keys count subgroups, as the usage does.
            Self::V1 => {
                (&["memory.limit_in_bytes"], "memory.usage_in_bytes", ["total_active_file", "total_inactive_file"])
            }
            Self::V2 => (&["memory.max", "memory.high"], "memory.current", ["active_file", "inactive_file"]),
        }
    }
}

/// Directories of the control groups that limit the memory of a process: its own groups and those around them.
///
/// `cgroup` and `mountinfo` are the files of these names in `/proc/self`.
fn group_directories(cgroup: &str, mountinfo: &str) -> Vec<(Version, PathBuf)> {
    let mut directories = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let version = match controllers {
            "" => Version::V2,
            listed if listed.split(',').any(|controller| controller == "memory") => Version::V1,
            _ => continue,
        };
        for (root, point) in mountinfo.lines().filter_map(|line| mount(line, version)) {
            // Within a container the mount may begin at the container's own group. Groups outside of it are not visible
            // then.
            let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
            let outside = below.components().any(|part| part == Component::ParentDir);
            let lowest: PathBuf =
                if outside { point.clone() } else { point.components().chain(below.components()).collect() };
            let up = lowest.ancestors().take_while(|directory| directory.starts_with(&point));
            directories.extend(up.map(|directory| (version, directory.to_owned())));
        }
    }
    directories
}

/// By a line of `mountinfo`: the group at which a mount of the hierarchy begins, and the directory of the mount.
fn mount(line: &str, version: Version) -> Option<(PathBuf, PathBuf)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let (name, _source, options) = (kind.next()?, kind.next()?, kind.next()?);
    let fits = match version {
        Version::V1 => name == "cgroup" && options.split(',').any(|option| option == "memory"),
        Version::V2 => name == "cgroup2",
    };
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, place.next()?);
    fits.then(|| (unescaped(root), unescaped(point)))
}

/// A path of `mountinfo`, where the kernel writes white space and backslashes as octal numbers.
fn unescaped(path: &str) -> PathBuf {
    path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\").into()
}

/// Memory that the control group in `directory` has to spare; `None` if it has no limit below `total`. The statistics
/// of such a group are not read: for each read the kernel adds up the counts of all cores.
fn spare_of_group(version: Version, directory: &Path, total: u64) -> Option<Spare> {
    let (limits, used, cache) = version.names();
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok();
    let limit = limits.iter().filter_map(|name| read(name)?.trim().parse::<u64>().ok()).min()?;
    if limit >= total {
        return None;
    }
    let used: u64 = read(used)?.trim().parse().ok()?;
    let cached = cached(&read("memory.stat").unwrap_or_default(), cache);
    let bytes = limit.saturating_sub(used.saturating_sub(cached));
    Some(Spare { bytes, of: Limited::Group { directory: directory.to_owned(), limit } })
}

/// Sum of the values of `keys` in a `memory.stat`.
fn cached(stat: &str, keys: [&str; 2]) -> u64 {
    let values = stat.lines().filter_map(|line| {
        let (key, value) = line.split_once(' ')?;
        keys.contains(&key).then(|| value.trim().parse::<u64>().ok())?
    });
    values.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1_MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    fn directories(cgroup: &str, mounts: &str) -> Vec<String> {
        let found = group_directories(cgroup, mounts).into_iter();
        found.map(|(version, directory)| format!("{version:?} {}", directory.display())).collect()
    }

    #[test]
    fn groups_are_found_in_both_versions() {
        let cgroup = "9:name=systemd:/\n4:memory:/jobs/7\n1:cpu:/jobs/7\n0::/\n";
        let expected = [
            "V1 /sys/fs/cgroup/memory/jobs/7",
            "V1 /sys/fs/cgroup/memory/jobs",
            "V1 /sys/fs/cgroup/memory",
            "V2 /sys/fs/cgroup/unified",
        ];
        assert_eq!(directories(cgroup, V1_MOUNTS), expected);
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(
            directories("0::/user.slice/a:b\n", v2),
            ["V2 /sys/fs/cgroup/user.slice/a:b", "V2 /sys/fs/cgroup/user.slice", "V2 /sys/fs/cgroup"]
        );
        assert_eq!(
            directories("4:cpu,memory:/x", "1 2 0:3 / /c\\040d rw - cgroup cgroup rw,cpu,memory"),
            ["V1 /c d/x", "V1 /c d"]
        );
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_mount() {
        let mounts = "9 8 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        assert_eq!(
            directories("4:memory:/docker/ab/x\n", mounts),
            ["V1 /sys/fs/cgroup/memory/x", "V1 /sys/fs/cgroup/memory"]
        );
        // With a namespace of control groups, and as a process from outside of it.
        for path in ["/docker/ab", "/", "/../other", "/elsewhere"] {
            let found = directories(&format!("4:memory:{path}\n"), mounts);
            assert_eq!(found, ["V1 /sys/fs/cgroup/memory"], "{path}");
        }
    }

    #[test]
    fn nonsense_has_no_groups() {
        for cgroup in ["", "4", "4:memory", "x:y:z", "\n\n"] {
            assert_eq!(directories(cgroup, V1_MOUNTS), [""; 0], "{cgroup:?}");
        }
        for mounts in ["", "-", " - ", "1 2 3 - cgroup cgroup rw,memory", "a b c d e - cgroup"] {
            assert_eq!(directories("4:memory:/x\n", mounts), [""; 0], "{mounts:?}");
        }
    }

    fn group(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, text)| fs::write(directory.path().join(name), text).unwrap());
        directory
    }

    #[test]
    fn page_cache_is_spare_and_no_limit_is_none() {
        let stat =
            "anon 500\nfile 400\ninactive_file 100\nactive_file 50\ntotal_inactive_file 20\ntotal_active_file 10\n";
        let limit_of_v1 = ("memory.limit_in_bytes", "1000\n");
        for (version, files, expected) in [
            (Version::V2, vec![("memory.max", "1000\n"), ("memory.current", "600\n")], Some((550, 1000))),
            (
                Version::V2,
                vec![("memory.max", "max\n"), ("memory.high", "800\n"), ("memory.current", "600\n")],
                Some((350, 800)),
            ),
            (Version::V2, vec![("memory.max", "max\n"), ("memory.high", "max\n"), ("memory.current", "600\n")], None),
            (Version::V2, vec![("memory.max", "100\n"), ("memory.current", "600\n")], Some((0, 100))),
            (Version::V2, vec![], None),
            (Version::V1, vec![limit_of_v1, ("memory.usage_in_bytes", "600\n")], Some((430, 1000))),
            (Version::V1, vec![limit_of_v1], None),
        ] {
            let directory = group(&[&files[..], &[("memory.stat", stat)]].concat());
            let spare = spare_of_group(version, directory.path(), 1001);
            let of = |limit| Limited::Group { directory: directory.path().to_owned(), limit };
            assert_eq!(spare, expected.map(|(bytes, limit)| Spare { bytes, of: of(limit) }), "{files:?}");
            assert_eq!(spare_of_group(version, directory.path(), 100), None, "the machine is the tighter limit");
        }
    }

    #[test]
    fn the_machine_has_memory_to_spare() {
        assert_eq!(bytes_of("MemTotal:  9 kB\nMemAvailable:   8 kB\n", "MemAvailable:"), Some(8192));
        for unreadable in ["", "MemAvailable: x kB", "MemAvailable: 8 MB"] {
            assert_eq!(bytes_of(unreadable, "MemAvailable:"), None, "{unreadable}");
        }
        assert!(spare().is_some_and(|spare| spare.bytes > 0));
    }
}
