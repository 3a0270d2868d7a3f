//! The start of every connection: both sides prove that they know the key, before anything else is parsed.
//!
//! Three messages of fixed size, little endian. Magic and version stand first and keep their place in every version, so
//! that two versions can recognise each other.
//!
//! ```text
//! challenge, by the one who accepts       proof, by the one who connects          answer, by the one who accepts
//!  0  8  magic "burn-ddp"                  0  8  magic                             0    8  magic
//!  8  2  version                           8  2  version                           8    2  version
//! 10  1  role: 1 store, 2 rank            10  1  purpose: 1 store, 2 control,     10    1  verdict
//! 11  1  zero                                    3 data                           11    1  zero
//! 12  4  rank                             11  1  zero                             12  212  why not, UTF-8, zeros after it
//! 16 32  nonce                            12  4  rank                            224   32  signature
//!                                         16  8  group
//!                                         24  8  tag of the job
//!                                         32 32  nonce
//!                                         64 32  signature
//! ```
//!
//! The proof signs the challenge and itself, the answer signs all three, each under a name of its own. So a signature
//! is worth nothing on another connection (the nonces differ), in the other direction (the names differ), at another
//! listener (role and rank are in it) or for another purpose.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::Socket;

use super::key::{KEY_BYTES, Key, random};
use crate::auth::job_key::JobTag;
use crate::frame::PROTOCOL_VERSION;
use crate::net::wait::wait;

/// Deadline of a handshake.
pub(crate) const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

const MAGIC: [u8; 8] = *b"burn-ddp";

pub(super) const CHALLENGE_BYTES: usize = 48;
pub(super) const PROOF_BYTES: usize = 96;
const PROOF_SIGNED: usize = PROOF_BYTES - KEY_BYTES;
const ANSWER_BYTES: usize = 256;
const ANSWER_SIGNED: usize = ANSWER_BYTES - KEY_BYTES;
const TEXT: std::ops::Range<usize> = 12..ANSWER_SIGNED;

/// Names under which the two sides sign.
const BY_CLIENT: &[u8] = b"burn-ddp client";
const BY_LISTENER: &[u8] = b"burn-ddp listener";

/// The listening side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Store,
    Rank(u32),
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// A client of the store.
    Store,
    /// The control connection of a rank.
    Control { rank: u32 },
    /// A rank's data connection within a group.
    Data { rank: u32, group: u64 },
}

/// First message, by the listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Challenge(pub(super) [u8; CHALLENGE_BYTES]);

/// Second message, by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Proof(pub(super) [u8; PROOF_BYTES]);

/// Last message, by the listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer(pub(super) [u8; ANSWER_BYTES]);

/// Outcome of a handshake for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Welcome,
    /// A sentence, signed.
    Refused(String),
    /// Unsigned, for want of a common key: the jobs differ.
    OtherJob,
    /// Unsigned, for want of a common key: the jobs are the same.
    OtherSecret,
}

impl Challenge {
    pub(crate) fn new(role: Role) -> io::Result<Self> {
        let mut bytes = start::<CHALLENGE_BYTES>();
        match role {
            Role::Store => bytes[10] = 1,
            Role::Rank(rank) => {
                bytes[10] = 2;
                bytes[12..16].copy_from_slice(&rank.to_le_bytes());
            }
        }
        bytes[16..].copy_from_slice(&random()?);
        Ok(Self(bytes))
    }

    fn role(&self) -> Option<Role> {
        let rank = u32::from_le_bytes(part(&self.0, 12));
        match (self.0[10], self.0[11], rank) {
            (1, 0, 0) => Some(Role::Store),
            (2, 0, rank) => Some(Role::Rank(rank)),
            _ => None,
        }
    }
}

impl Proof {
    pub(crate) fn new(key: &Key, tag: JobTag, purpose: Purpose, challenge: &Challenge) -> io::Result<Self> {
        let mut bytes = start::<PROOF_BYTES>();
        let (kind, rank, group) = match purpose {
            Purpose::Store => (1, 0, 0),
            Purpose::Control { rank } => (2, rank, 0),
            Purpose::Data { rank, group } => (3, rank, group),
        };
        bytes[10] = kind;
        bytes[12..16].copy_from_slice(&rank.to_le_bytes());
        bytes[16..24].copy_from_slice(&group.to_le_bytes());
        bytes[24..32].copy_from_slice(&tag);
        bytes[32..PROOF_SIGNED].copy_from_slice(&random()?);
        let signature = key.sign(&[BY_CLIENT, &challenge.0, &bytes[..PROOF_SIGNED]]);
        bytes[PROOF_SIGNED..].copy_from_slice(&signature);
        Ok(Self(bytes))
    }

    /// Purpose that it asks for.
    ///
    /// # Errors
    /// What is wrong with it, if it is not of this protocol.
    pub(crate) fn purpose(&self) -> Result<Purpose, Foreign> {
        check(&self.0)?;
        let rank = u32::from_le_bytes(part(&self.0, 12));
        let group = u64::from_le_bytes(part(&self.0, 16));
        match (self.0[10], self.0[11], rank, group) {
            (1, 0, 0, 0) => Ok(Purpose::Store),
            (2, 0, rank, 0) => Ok(Purpose::Control { rank }),
            (3, 0, rank, group) => Ok(Purpose::Data { rank, group }),
            _ => Err(Foreign::NotOurs),
        }
    }

    pub(crate) fn tag(&self) -> JobTag {
        part(&self.0, 24)
    }

    /// True if its sender knows the key.
    pub(crate) fn is_signed_by(&self, key: &Key, challenge: &Challenge) -> bool {
        key.verify(&[BY_CLIENT, &challenge.0, &self.0[..PROOF_SIGNED]], &part(&self.0, PROOF_SIGNED))
    }
}

impl Answer {
    /// Answer to a proof of `key`.
    pub(crate) fn signed(key: &Key, verdict: Result<(), &str>, challenge: &Challenge, proof: &Proof) -> Self {
        let mut bytes = start::<ANSWER_BYTES>();
        if let Err(cause) = verdict {
            bytes[10] = 1;
            let cause = &cause[..cause.floor_char_boundary(TEXT.len())];
            bytes[TEXT][..cause.len()].copy_from_slice(cause.as_bytes());
        }
        let signature = key.sign(&[BY_LISTENER, &challenge.0, &proof.0, &bytes[..ANSWER_SIGNED]]);
        bytes[ANSWER_SIGNED..].copy_from_slice(&signature);
        Self(bytes)
    }

    /// Answer to a proof of another key.
    pub(crate) fn unsigned(same_job: bool) -> Self {
        let mut bytes = start::<ANSWER_BYTES>();
        bytes[10] = if same_job { 3 } else { 2 };
        Self(bytes)
    }

    /// Its verdict, if it is the answer to this challenge and proof.
    pub(crate) fn verdict(&self, key: &Key, challenge: &Challenge, proof: &Proof) -> Result<Verdict, Foreign> {
        check(&self.0)?;
        let signed =
            key.verify(&[BY_LISTENER, &challenge.0, &proof.0, &self.0[..ANSWER_SIGNED]], &part(&self.0, ANSWER_SIGNED));
        match (self.0[10], signed) {
            (0, true) => Ok(Verdict::Welcome),
            // It accepted our proof, or pretends to, but gave none of its own.
            (0 | 3, false) => Ok(Verdict::OtherSecret),
            (1, true) => {
                let text = &self.0[TEXT];
                let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
                Ok(Verdict::Refused(String::from_utf8_lossy(&text[..end]).into_owned()))
            }
            (2, false) => Ok(Verdict::OtherJob),
            _ => Err(Foreign::NotOurs),
        }
    }
}

/// Reason that bytes are no message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Foreign {
    NotOurs,
    Version(u16),
}

fn start<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    bytes
}

/// First bytes of every message of every version.
fn check(bytes: &[u8]) -> Result<(), Foreign> {
    let Some((start, _)) = bytes.split_first_chunk::<10>() else { return Err(Foreign::NotOurs) };
    match u16::from_le_bytes(part(start, 8)) {
        _ if start[..8] != MAGIC => Err(Foreign::NotOurs),
        PROTOCOL_VERSION => Ok(()),
        other => Err(Foreign::Version(other)),
    }
}

/// True if a message that begins like this can become one of this protocol.
pub(super) fn begins_like_ours(bytes: &[u8]) -> bool {
    bytes.iter().zip(MAGIC).all(|(byte, ours)| *byte == ours)
}

/// `N` bytes of `bytes`, which are there.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// Key and purpose of a client.
pub(crate) struct Introduction<'a> {
    pub(crate) key: &'a Key,
    pub(crate) tag: JobTag,
    pub(crate) to: Role,
    pub(crate) purpose: Purpose,
}

/// Reason that a connection failed.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// No answer, or one of another protocol: it may work later, or elsewhere.
    NotOurs(io::Error),
    /// A refusal: another version, another job, a rank that is already connected.
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

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Self {
        Self::NotOurs(e)
    }
}

impl From<Foreign> for Refusal {
    fn from(foreign: Foreign) -> Self {
        match foreign {
            Foreign::NotOurs => {
                Self::NotOurs(io::Error::new(ErrorKind::InvalidData, "it does not speak burn-ddp's protocol"))
            }
            Foreign::Version(there) => Self::Refused(format!(
                "protocol version {PROTOCOL_VERSION} here, {there} there: all ranks and the launcher must be built \
                 with the same burn-ddp"
            )),
        }
    }
}

/// Performs the client's part of the handshake on a fresh, non-blocking connection.
pub(crate) fn introduce(socket: &Socket, me: &Introduction<'_>, deadline: Instant) -> Result<(), Refusal> {
    let challenge = Challenge(read(socket, deadline)?);
    check(&challenge.0)?;
    match challenge.role() {
        Some(role) if role == me.to => {}
        Some(role) => return Err(Refusal::Refused(format!("this is {role}, the connection was meant for {}", me.to))),
        None => return Err(Foreign::NotOurs.into()),
    }
    let proof = Proof::new(me.key, me.tag, me.purpose, &challenge)?;
    write(socket, &proof.0, deadline)?;
    let answer = Answer(read(socket, deadline)?);
    match answer.verdict(me.key, &challenge, &proof)? {
        Verdict::Welcome => Ok(()),
        Verdict::Refused(cause) => Err(Refusal::Refused(cause)),
        Verdict::OtherJob => Err(Refusal::Refused(format!("{} there is of another job", me.to))),
        Verdict::OtherSecret => Err(Refusal::Refused(format!("{} there was started with another secret", me.to))),
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Store => f.write_str("the store"),
            Self::Rank(rank) => write!(f, "rank {rank}"),
        }
    }
}

fn read<const N: usize>(mut socket: &Socket, deadline: Instant) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        match socket.read(&mut bytes[have..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) => ready_after(e, socket, PollFlags::IN, deadline)?,
        }
    }
    Ok(bytes)
}

fn write(mut socket: &Socket, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        match socket.write(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(e) => ready_after(e, socket, PollFlags::OUT, deadline)?,
        }
    }
    Ok(())
}

fn ready_after(e: io::Error, socket: &Socket, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    match e.kind() {
        ErrorKind::Interrupted => Ok(()),
        ErrorKind::WouldBlock if wait(&mut [PollFd::new(socket, flags)], Some(deadline))? => Ok(()),
        ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
        _ => Err(e),
    }
}

/// All three messages made of any bytes, each read the way its receiver does.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    fn filled<const N: usize>(bytes: &mut &[u8], ours: bool) -> [u8; N] {
        let mut message = if ours { start() } else { [0; N] };
        let (said, rest) = bytes.split_at(bytes.len().min(N - 10));
        message[10..10 + said.len()].copy_from_slice(said);
        *bytes = rest;
        message
    }
    // Most inputs get past magic and version, or there would be little to see behind them.
    let Some((first, mut rest)) = bytes.split_first() else { return };
    let ours = first % 8 != 0;
    let (challenge, proof) = (Challenge(filled(&mut rest, ours)), Proof(filled(&mut rest, ours)));
    let answer = Answer(filled(&mut rest, ours));
    let key = Key::new([7; KEY_BYTES]);
    let _ = (check(&challenge.0), challenge.role(), proof.tag(), begins_like_ours(bytes));
    assert!(ours || proof.purpose().is_err());
    assert!(!proof.is_signed_by(&key, &challenge), "a signature by chance");
    assert!(!matches!(answer.verdict(&key, &challenge, &proof), Ok(Verdict::Welcome | Verdict::Refused(_))));
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::auth::unauthenticated::Strangers;

    const TAG: JobTag = [7; 8];

    fn key(n: u8) -> Key {
        Key::new([n; 32])
    }

    fn sockets() -> (Socket, Socket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let b = listener.accept().unwrap().0;
        for stream in [&a, &b] {
            stream.set_nonblocking(true).unwrap();
        }
        (a.into(), b.into())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    /// How a connection to `role` with key 1 goes for one that has `theirs`.
    fn met(role: Role, me: &Introduction<'_>) -> (Result<(), Refusal>, Option<Purpose>) {
        let (client, listener) = sockets();
        std::thread::scope(|s| {
            let met = s.spawn(move || {
                let mut strangers = Strangers::new(role);
                strangers.receive(listener, None);
                while strangers.deadline().is_some() {
                    if let Some(stranger) = strangers.hear(&[true]).pop() {
                        let purpose = stranger.purpose;
                        if stranger.knows(&key(1)) {
                            stranger.welcome(&key(1)).unwrap();
                            return Some(purpose);
                        }
                        let same_job = stranger.tag() == TAG;
                        stranger.turn_away(same_job);
                        return None;
                    }
                    std::thread::yield_now();
                }
                None
            });
            let said = introduce(&client, me, soon());
            drop(client);
            (said, met.join().unwrap())
        })
    }

    #[test]
    fn who_knows_the_key_is_welcome_for_what_it_came_for() {
        let key = key(1);
        for (to, purpose) in [
            (Role::Store, Purpose::Store),
            (Role::Rank(0), Purpose::Control { rank: 3 }),
            (Role::Rank(u32::MAX), Purpose::Data { rank: 3, group: u64::MAX }),
        ] {
            let (said, met) = met(to, &Introduction { key: &key, tag: TAG, to, purpose });
            said.unwrap();
            assert_eq!(met, Some(purpose));
        }
    }

    #[test]
    fn another_secret_job_or_door_is_told_apart() {
        let (ours, other) = (key(1), key(2));
        let store = Introduction { key: &other, tag: TAG, to: Role::Store, purpose: Purpose::Store };
        let refused = |role, me: &Introduction<'_>| match met(role, me) {
            (Err(Refusal::Refused(cause)), None) => cause,
            (said, met) => panic!("{said:?} {met:?}"),
        };
        assert!(refused(Role::Store, &store).contains("another secret"));
        assert!(refused(Role::Store, &Introduction { tag: [8; 8], ..store }).contains("another job"));
        let cause = refused(Role::Rank(2), &Introduction { key: &ours, ..store });
        assert!(cause.contains("this is rank 2") && cause.contains("the store"), "{cause}");
    }

    #[test]
    fn a_proof_is_worth_nothing_elsewhere() {
        let key = key(1);
        let challenge = Challenge::new(Role::Rank(1)).unwrap();
        let proof = Proof::new(&key, TAG, Purpose::Control { rank: 2 }, &challenge).unwrap();
        assert!(proof.is_signed_by(&key, &challenge));
        // Replayed later, or at the door of another rank.
        assert!(!proof.is_signed_by(&key, &Challenge::new(Role::Rank(1)).unwrap()));
        let mut elsewhere = challenge;
        elsewhere.0[12] = 0;
        assert!(!proof.is_signed_by(&key, &elsewhere));
        // With anything in it changed: rank, group, purpose, job, nonce, signature.
        for at in 10..PROOF_BYTES {
            let mut changed = proof;
            changed.0[at] ^= 1;
            assert!(!changed.is_signed_by(&key, &challenge), "byte {at}");
        }
    }

    #[test]
    fn a_signature_of_one_side_is_none_of_the_other() {
        // What a listener signed, sent back as a proof, and the other way round.
        let key = key(1);
        let challenge = Challenge::new(Role::Store).unwrap();
        let proof = Proof::new(&key, TAG, Purpose::Store, &challenge).unwrap();
        let answer = Answer::signed(&key, Ok(()), &challenge, &proof);
        let mut reflected = proof;
        reflected.0[PROOF_SIGNED..].copy_from_slice(&answer.0[ANSWER_SIGNED..]);
        assert!(!reflected.is_signed_by(&key, &challenge));
        let mut reflected = answer;
        reflected.0[ANSWER_SIGNED..].copy_from_slice(&proof.0[PROOF_SIGNED..]);
        assert_eq!(reflected.verdict(&key, &challenge, &proof), Ok(Verdict::OtherSecret));
    }

    #[test]
    fn an_answer_counts_for_its_challenge_and_proof() {
        let key = key(1);
        let challenge = Challenge::new(Role::Store).unwrap();
        let proof = Proof::new(&key, TAG, Purpose::Store, &challenge).unwrap();
        let again = Proof::new(&key, TAG, Purpose::Store, &challenge).unwrap();
        let long = "ü".repeat(200);
        for (verdict, expected) in [
            (Ok(()), Verdict::Welcome),
            (Err("no"), Verdict::Refused("no".into())),
            (Err(&long[..]), Verdict::Refused("ü".repeat(106))),
        ] {
            let answer = Answer::signed(&key, verdict, &challenge, &proof);
            assert_eq!(answer.verdict(&key, &challenge, &proof), Ok(expected.clone()));
            assert_ne!(answer.verdict(&key, &challenge, &again), Ok(expected), "replayed");
        }
        // A sentence that nobody signed is not passed on.
        let forged = Answer::signed(&self::key(2), Err("run this"), &challenge, &proof);
        assert_eq!(forged.verdict(&key, &challenge, &proof), Err(Foreign::NotOurs));
        assert_eq!(Answer::unsigned(true).verdict(&key, &challenge, &proof), Ok(Verdict::OtherSecret));
        assert_eq!(Answer::unsigned(false).verdict(&key, &challenge, &proof), Ok(Verdict::OtherJob));
    }

    #[test]
    fn other_versions_and_protocols_are_told_apart() {
        let said = |bytes: &[u8]| {
            let (client, listener) = sockets();
            (&listener).write_all(bytes).unwrap();
            drop(listener);
            let key = key(1);
            introduce(&client, &Introduction { key: &key, tag: TAG, to: Role::Store, purpose: Purpose::Store }, soon())
                .unwrap_err()
        };
        let mut newer = Challenge::new(Role::Store).unwrap().0;
        newer[8] = 77;
        let text = said(&newer).to_string();
        assert!(text.contains(&format!("version {PROTOCOL_VERSION} here, 77 there")), "{text}");
        let mut other = Challenge::new(Role::Store).unwrap().0;
        other[0] = b'B';
        for bytes in
            [&other[..], b"", b"burn-ddp", b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"]
        {
            assert!(matches!(said(bytes), Refusal::NotOurs(_)), "{bytes:?}");
        }
        let mut proof = Proof::new(&key(1), TAG, Purpose::Store, &Challenge(other)).unwrap();
        proof.0[8] = 77;
        assert_eq!(proof.purpose(), Err(Foreign::Version(77)));
    }
}
