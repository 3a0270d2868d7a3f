//! The first message of every connection: who connects, to which job, for what.
//!
//! Nothing else is parsed before it was accepted. Magic and version stand first and keep their place in every version, so that two
//! versions can tell each other which they are.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::wire::Wire;
use crate::frame::PROTOCOL_VERSION;

/// How long a stranger may take to say hello.
pub(crate) const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// Longest hello or answer, in bytes.
pub(crate) const HELLO_CAP: usize = 1024;

const MAGIC: [u8; 8] = *b"burn-ddp";

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// A client of the store.
    Store,
    /// The control connection of a rank.
    Control { rank: u32 },
    /// A rank's data connection within a group.
    Data { rank: u32, group: u64 },
}

/// Said by the one who connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    magic: [u8; 8],
    version: u16,
    /// The job: its id for the store, its token between ranks.
    job: String,
    pub(crate) purpose: Purpose,
}

/// Whom a listener admits.
pub(crate) enum Admits<'a> {
    AnyJob,
    /// Clients of this job, whose name may be told.
    Job(&'a str),
    /// Ranks that know this.
    Token(&'a str),
}

/// Answered by the one who accepts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    magic: [u8; 8],
    version: u16,
    verdict: Result<(), String>,
}

impl Hello {
    pub(crate) fn new(job: &str, purpose: Purpose) -> Self {
        Self { magic: MAGIC, version: PROTOCOL_VERSION, job: job.to_owned(), purpose }
    }

    /// Whether the connection may stay. The one place where a connection is admitted: authentication belongs here.
    ///
    /// # Errors
    /// What to answer before closing.
    pub(crate) fn admit(&self, admits: &Admits<'_>) -> Result<(), String> {
        if self.magic != MAGIC {
            return Err("this is a burn-ddp port".into());
        }
        if self.version != PROTOCOL_VERSION {
            return Err(versions_differ(PROTOCOL_VERSION, self.version));
        }
        match *admits {
            Admits::Job(job) if self.job != job => {
                Err(format!("this is job {job:?}, the connection came for job {:?}", self.job))
            }
            Admits::Token(token) if self.job != token => Err("this is a rank of another job".into()),
            _ => Ok(()),
        }
    }
}

impl Answer {
    pub(crate) fn new(verdict: Result<(), String>) -> Self {
        let verdict = verdict.map_err(|mut cause| {
            cause.truncate(cause.floor_char_boundary(HELLO_CAP / 2));
            cause
        });
        Self { magic: MAGIC, version: PROTOCOL_VERSION, verdict }
    }
}

fn versions_differ(here: u16, there: u16) -> String {
    format!(
        "protocol version {here} here, {there} there: all ranks and the launcher must be built with the same burn-ddp"
    )
}

/// Why a hello was not welcome.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// No answer, or one that is not ours: perhaps later, perhaps elsewhere.
    NotOurs(io::Error),
    /// One of ours, which says no: another version, another job, a rank that is already there.
    Refused(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotOurs(e) if e.kind() == ErrorKind::UnexpectedEof => {
                f.write_str("it closed the connection without an answer")
            }
            Self::NotOurs(e) if e.kind() == ErrorKind::TimedOut => f.write_str("it gave no answer"),
            Self::NotOurs(e) => write!(f, "{e}"),
            Self::Refused(cause) => f.write_str(cause),
        }
    }
}

/// Says hello on a fresh connection and waits for the welcome.
pub(crate) fn say(stream: TcpStream, hello: &Hello, deadline: Instant) -> Result<Wire, Refusal> {
    let mut wire = Wire::new(stream, HELLO_CAP).map_err(Refusal::NotOurs)?;
    wire.send(hello, deadline).map_err(Refusal::NotOurs)?;
    let answer: Answer = wire.recv(deadline).map_err(Refusal::NotOurs)?;
    if answer.magic != MAGIC {
        return Err(Refusal::NotOurs(io::Error::new(ErrorKind::InvalidData, "it does not speak burn-ddp's protocol")));
    }
    match answer.verdict {
        Err(cause) => Err(Refusal::Refused(cause)),
        Ok(()) if answer.version != PROTOCOL_VERSION => {
            Err(Refusal::Refused(versions_differ(PROTOCOL_VERSION, answer.version)))
        }
        Ok(()) => Ok(wire),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What a listener that answers `answer` makes of a hello.
    fn said(hello: Hello, answer: impl FnOnce(Hello) -> Answer + Send) -> Result<(), Refusal> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut wire = Wire::new(listener.accept().unwrap().0, HELLO_CAP).unwrap();
                let hello = wire.recv(deadline).unwrap();
                wire.send(&answer(hello), deadline).unwrap();
            });
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            say(stream, &hello, deadline).map(drop)
        })
    }

    #[test]
    fn the_same_job_and_version_is_welcome() {
        let hello = Hello::new("job", Purpose::Data { rank: 3, group: 9 });
        said(hello.clone(), |h| Answer::new(h.admit(&Admits::Token("job")))).unwrap();
    }

    #[test]
    fn another_job_or_version_is_refused_with_both_named() {
        let refused = said(Hello::new("mine", Purpose::Store), |h| Answer::new(h.admit(&Admits::Job("theirs"))))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("\"mine\"") && refused.contains("\"theirs\""), "{refused}");
        let refused = said(Hello::new("guess", Purpose::Store), |h| Answer::new(h.admit(&Admits::Token("secret"))));
        assert!(!refused.unwrap_err().to_string().contains("secret"));

        let mut hello = Hello::new("job", Purpose::Store);
        hello.version = 77;
        let refused = said(hello, |h| Answer::new(h.admit(&Admits::Token("job")))).unwrap_err().to_string();
        assert!(refused.contains("version 1 here, 77 there"), "{refused}");

        let newer = |_| Answer { version: 78, ..Answer::new(Ok(())) };
        let refused = said(Hello::new("job", Purpose::Store), newer).unwrap_err().to_string();
        assert!(refused.contains("version 1 here, 78 there"), "{refused}");
    }

    #[test]
    fn something_else_on_the_port_is_told_apart_from_a_refusal() {
        let other = |_| Answer { magic: *b"whatever", ..Answer::new(Ok(())) };
        assert!(matches!(said(Hello::new("job", Purpose::Store), other), Err(Refusal::NotOurs(_))));
    }

    #[test]
    fn the_longest_job_id_and_refusal_fit_the_cap() {
        let hello = Hello::new(&"j".repeat(crate::env::JOB_ID_CAP), Purpose::Store);
        assert!(postcard::to_stdvec(&hello).unwrap().len() <= HELLO_CAP);
        let answer = Answer::new(Err("ü".repeat(HELLO_CAP)));
        assert!(postcard::to_stdvec(&answer).unwrap().len() <= HELLO_CAP);
    }
}
