//! Hosts of a job: lines of a hostfile, or words of `--host`.

use std::path::{Path, PathBuf};

use crate::error::LaunchError;

/// One machine of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Name that ssh connects to, also `user@name`.
    pub name: String,
    /// Number of ranks on this host; `None` if the hostfile or `--host` gives no number.
    pub slots: Option<usize>,
    /// Working directory of this host; `None` stands for the job's.
    pub directory: Option<PathBuf>,
    /// Variables of this host's ranks, in addition to the variables of all hosts.
    pub env: Vec<(String, String)>,
}

impl Host {
    /// The hosts in the file at `path`: a host per line, such as `node1 slots=4 dir=/scratch env=NAME=value`; `#`
    /// begins a comment.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Hostfile`] if the file cannot be read, or with the line that is wrong.
    pub fn read(path: &Path) -> Result<Vec<Self>, LaunchError> {
        let failed = |reason| LaunchError::Hostfile { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        parse_file(&text).map_err(failed)
    }

    /// The hosts that words such as `node1:4` name.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Usage`] with the word that is wrong.
    pub fn list<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Vec<Self>, LaunchError> {
        let hosts: Result<Vec<_>, _> = words.into_iter().map(parse_name).collect();
        hosts.and_then(distinct).map_err(|wrong| LaunchError::Usage(format!("--host: {wrong}")))
    }

    /// Name of the host without the user: the address at which other machines reach it.
    #[must_use]
    pub fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, host)| host)
    }
}

fn parse_file(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            hosts.push(parse_line(line).map_err(|wrong| format!("line {number}: {wrong}"))?);
        }
    }
    distinct(hosts)
}

fn parse_line(line: &str) -> Result<Host, String> {
    let mut words = line.split_whitespace();
    let mut host = parse_name(words.next().unwrap_or_default())?;
    for word in words {
        match word.split_once('=') {
            Some(("slots", slots)) if host.slots.is_none() => host.slots = Some(parse_slots(slots)?),
            Some(("slots", _)) => return Err(format!("{} has two numbers of slots", host.name)),
            Some(("dir", directory)) if !directory.is_empty() => host.directory = Some(directory.into()),
            Some(("env", variable)) => {
                let (name, value) = variable
                    .split_once('=')
                    .filter(|(name, _)| !name.is_empty())
                    .ok_or_else(|| format!("{word:?} is not of the form env=NAME=VALUE"))?;
                host.env.push((name.into(), value.into()));
            }
            _ => return Err(format!("{word:?} is none of slots=N, dir=DIRECTORY, env=NAME=VALUE")),
        }
    }
    Ok(host)
}

/// `node1`, `user@node1`, `node1:4`, `[::1]:4`.
fn parse_name(word: &str) -> Result<Host, String> {
    let (name, slots) = match word.rsplit_once(':') {
        Some((name, slots)) if !name.contains(':') || name.ends_with(']') => (name, Some(parse_slots(slots)?)),
        _ => (word, None),
    };
    let (user, address) = name.rsplit_once('@').map_or(("", name), |(user, address)| (&name[..=user.len()], address));
    let bracketed = address.strip_prefix('[').and_then(|inner| inner.strip_suffix(']'));
    let address = bracketed.unwrap_or(address);
    let plain = |c: char| c.is_alphanumeric() || "-_.@:%".contains(c);
    // ssh would take a leading `-` for an option.
    let wrong = |part: &str| part.starts_with('-') || !part.chars().all(plain);
    if address.is_empty() || user == "@" || wrong(user) || wrong(address) {
        return Err(format!("{word:?} is no name of a host"));
    }
    Ok(Host { name: format!("{user}{address}"), slots, ..Host::default() })
}

fn parse_slots(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|slots| *slots > 0).ok_or_else(|| format!("{text:?} is no number of ranks from 1 up"))
}

/// Refuses an empty list, and a host that is listed twice: its two launchers would give out the same local ranks.
fn distinct(hosts: Vec<Host>) -> Result<Vec<Host>, String> {
    if hosts.is_empty() {
        return Err("there is no host".into());
    }
    for (nth, host) in hosts.iter().enumerate() {
        if hosts[..nth].iter().any(|other| other.name == host.name) {
            return Err(format!("{} is listed twice: list it once, with all its slots", host.name));
        }
    }
    Ok(hosts)
}

/// Parses `text` as a hostfile and as words of `--host`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(text: &str) {
    for host in parse_file(text).unwrap_or_default() {
        assert!(!host.address().is_empty() && !host.name.starts_with('-'), "{host:?}");
        assert!(host.slots != Some(0) && host.env.iter().all(|(name, _)| !name.is_empty()), "{host:?}");
    }
    let _ = Host::list(text.split(','));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read_line_by_line() {
        let text = "# the cluster\nnode1 slots=4\n\n  me@node2\tslots=2 dir=/scratch/me env=A=b=c env=D= # a comment\n\
                    node3:8\n";
        let found = parse_file(text).unwrap();
        let env = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let second = Host {
            name: "me@node2".into(),
            slots: Some(2),
            directory: Some("/scratch/me".into()),
            env: vec![env("A", "b=c"), env("D", "")],
        };
        let plain = |name: &str, slots| Host { name: name.into(), slots: Some(slots), ..Host::default() };
        assert_eq!(found, [plain("node1", 4), second.clone(), plain("node3", 8)]);
        assert_eq!((second.address(), found[0].address()), ("node2", "node1"));
    }

    #[test]
    fn hosts_are_listed_as_words() {
        let named = |words: &[&str]| {
            let hosts = Host::list(words.iter().copied()).unwrap();
            hosts.into_iter().map(|host| (host.name, host.slots)).collect::<Vec<_>>()
        };
        assert_eq!(named(&["a:4", "b"]), [("a".into(), Some(4)), ("b".into(), None)]);
        assert_eq!(named(&["[fe80::1]:2", "fe80::2"]), [("fe80::1".into(), Some(2)), ("fe80::2".into(), None)]);
    }

    #[test]
    fn a_hostfile_that_cannot_be_used_has_an_error_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let (missing, wrong) = (dir.path().join("missing"), dir.path().join("wrong"));
        std::fs::write(&wrong, "a\nb cpus=4\n").unwrap();
        for (path, part) in [(missing, "No such file"), (wrong, "line 2: \"cpus=4\" is none of")] {
            let error = Host::read(&path).unwrap_err();
            assert!(matches!(error, LaunchError::Hostfile { .. }) && error.exit_code() == 2, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn wrong_lines_are_named() {
        for (text, part) in [
            ("", "no host"),
            ("# nothing\n", "no host"),
            ("a\nb slots=0\n", "line 2: \"0\" is no number"),
            ("a slots=x", "no number"),
            ("a:4 slots=2", "two numbers"),
            ("a cpus=4", "none of slots=N"),
            ("a env=B", "env=NAME=VALUE"),
            ("a env==B", "env=NAME=VALUE"),
            ("a dir=", "none of slots=N"),
            ("a\nb\na", "a is listed twice"),
            ("-oProxyCommand=x", "no name"),
            ("a;reboot", "no name"),
            ("a:", "no number"),
            ("me@", "no name"),
            ("@a", "no name"),
            ("me@-oProxyCommand=x", "no name"),
            ("a[b", "no name"),
            ("[::1", "no name"),
        ] {
            let error = parse_file(text).unwrap_err();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }
}
