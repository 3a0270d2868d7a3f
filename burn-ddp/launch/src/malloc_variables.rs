//! Variables by which glibc keeps the memory that a rank frees, instead of returning it to the system.
//!
//! A training step frees and allocates the same tensors again. By default glibc returns their memory to the system, and
//! the next step pays for it with page faults: see "A small network" in the benchmark's `RESULTS.md`.

use std::ffi::OsString;
use std::process::Command;

/// Names and values of the variables, sizes in bytes.
///
/// - Allocations from 32 MiB on are still returned when they are freed. Older versions of glibc ignore a larger value
///   (on 32-bit machines also this one) and would then return all allocations from 128 KiB on.
/// - At the end of a heap glibc keeps up to 256 MiB of free memory in the first arena, and the whole heap (64 MiB) in
///   the other arenas.
/// - There are four arenas; glibc's default is eight per core. With four, the threads of a rank that allocate tensors
///   all the time (training, communication, loading) do not wait for each other; with two, a training took more
///   processor time.
const SETTINGS: [(&str, &str); 3] =
    [("MALLOC_MMAP_THRESHOLD_", "33554432"), ("MALLOC_TRIM_THRESHOLD_", "268435456"), ("MALLOC_ARENA_MAX", "4")];
/// Their names in `GLIBC_TUNABLES`.
const TUNABLES: [&str; 3] = ["glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.arena_max"];

/// Sets the variables for a rank, unless its environment (`lookup`) has one of them, names one of them in
/// `GLIBC_TUNABLES` or preloads another allocator. A variable that the user has set to an empty text stands for glibc's
/// default and is removed, since glibc would read it as 0. C libraries other than glibc ignore the variables.
pub(crate) fn keep_freed_memory(command: &mut Command, lookup: impl Fn(&str) -> Option<OsString>) {
    let names = |variable: &str, parts: &[&str]| {
        let value = lookup(variable).unwrap_or_default();
        parts.iter().any(|part| value.to_string_lossy().contains(part))
    };
    let chosen = SETTINGS.map(|(name, _)| lookup(name));
    let elsewhere = names("GLIBC_TUNABLES", &TUNABLES) || names("LD_PRELOAD", &["malloc"]);
    if cfg!(all(target_os = "linux", target_pointer_width = "64")) && chosen.iter().all(Option::is_none) && !elsewhere {
        command.envs(SETTINGS);
    }
    for ((name, _), value) in SETTINGS.iter().zip(chosen) {
        if value.is_some_and(|value| value.is_empty()) {
            command.env_remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// What a rank gets that would have these variables: `None` for one that is removed.
    fn settings(environment: &[(&str, &str)]) -> BTreeMap<String, Option<String>> {
        let environment: BTreeMap<_, _> = environment.iter().copied().collect();
        let mut command = Command::new("rank");
        keep_freed_memory(&mut command, |name| environment.get(name).map(OsString::from));
        let text = |text: &std::ffi::OsStr| text.to_str().unwrap().to_owned();
        command.get_envs().map(|(name, value)| (text(name), value.map(text))).collect()
    }

    #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
    #[test]
    fn freed_memory_stays_unless_the_user_has_chosen() {
        let all = SETTINGS.map(|(name, value)| (name.to_owned(), Some(value.to_owned())));
        for unrelated in [&[][..], &[("GLIBC_TUNABLES", "glibc.malloc.perturb=2"), ("LD_PRELOAD", "libfaketime.so")]] {
            assert_eq!(settings(unrelated), BTreeMap::from(all.clone()), "{unrelated:?}");
        }
        for chosen in [
            ("MALLOC_TRIM_THRESHOLD_", "131072"),
            ("MALLOC_MMAP_THRESHOLD_", "131072"),
            ("MALLOC_ARENA_MAX", "2"),
            ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2"),
            ("GLIBC_TUNABLES", "glibc.malloc.perturb=2:glibc.malloc.trim_threshold=131072"),
            ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
            ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
            ("LD_PRELOAD", "libtcmalloc_minimal.so.4"),
        ] {
            assert_eq!(settings(&[chosen]), BTreeMap::new(), "{chosen:?}");
        }
    }

    #[test]
    fn an_empty_variable_stands_for_the_default_of_glibc() {
        let removed = |name: &str| BTreeMap::from([(name.to_owned(), None)]);
        for (name, _) in SETTINGS {
            assert_eq!(settings(&[(name, "")]), removed(name));
        }
        assert_eq!(
            settings(&[("MALLOC_TRIM_THRESHOLD_", ""), ("MALLOC_MMAP_THRESHOLD_", "4096")]),
            removed("MALLOC_TRIM_THRESHOLD_")
        );
    }
}
