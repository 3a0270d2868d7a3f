//! The start of every connection: both sides prove that they know the key, and agree on keys of this connection alone,
//! before anything else is parsed.
//!
//! Noise `NNpsk0` in three messages of fixed size, little endian. Magic and version stand first and keep their place in
//! every version, so that two versions can recognise each other.
//!
//! ```text
//! greeting, by the listener               opening, by the client                  answer, by the listener
//!  0  8  magic "burn-ddp"                  0  8  magic                             0    8  magic
//!  8  2  version                           8  2  version                           8    2  version
//! 10  1  role: 1 store, 2 rank            10  1  purpose: 1 store, 2 control,     10    1  0 Noise, 2 another job,
//! 11  1  zero                                    3 data, 4 data of an open group           3 another key
//! 12  4  rank                             11  1  flow                             11    1  zero
//! 16 32  nonce                            12  4  zero                             12  244  Noise: e, ee, and sealed:
//!                                         16  8  group                                      0 welcome or 1 refused,
//!                                         24  8  tag of the job                             the reason, UTF-8, zeros
//!                                         32 52  Noise: psk, e, and sealed: rank
//! ```
//!
//! The greeting and the clear part of the opening are the prologue of Noise: the handshake fails unless both ends saw
//! the same bytes. The greeting's nonce makes an opening worthless on any other connection, so an opening that can be
//! decrypted proves that the client knows the key. The answer proves the same of the listener. A refusal that is not
//! sealed carries a number and no text.
//!
//! Store and control connections go on with [records](crate::net::encrypted_messages) under the session keys that were
//! agreed. Data connections do so if `WorldOptions::encrypt_data` is set, and else go on in the clear.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use snow::HandshakeState;
use socket2::Socket;

use super::hmac_key::{Key, random};
use super::noise::{self, PUBLIC_KEY_BYTES, to_io};
use super::secure_stream::{SEAL_BYTES, SecureStream, SessionKeys};
use crate::auth::job_key::JobTag;
use crate::frame::PROTOCOL_VERSION;
use crate::net::wait::wait;

/// Deadline of a handshake.
pub(crate) const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

const MAGIC: [u8; 8] = *b"burn-ddp";

pub(super) const GREETING_BYTES: usize = 48;
/// Bytes of the opening in front of its Noise message, sent in the clear.
const CLEAR_BYTES: usize = 32;
/// Sealed content of the opening: a rank.
const RANK_BYTES: usize = 4;
pub(super) const OPENING_BYTES: usize = CLEAR_BYTES + PUBLIC_KEY_BYTES + RANK_BYTES + SEAL_BYTES;
const ANSWER_BYTES: usize = 256;
const ANSWER_NOISE: usize = 12;
/// Sealed content of the answer: the verdict and its reason.
const VERDICT_BYTES: usize = ANSWER_BYTES - ANSWER_NOISE - PUBLIC_KEY_BYTES - SEAL_BYTES;

/// Role of the listening process.
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
    /// One of the flows, parallel data connections, between two ranks of a group. `opened` is true if all ranks had
    /// opened the group before the connection was made: a listener where the group is not open has then closed it.
    Data { rank: u32, group: u64, flow: u8, opened: bool },
}

impl Purpose {
    /// The same purpose with `opened` cleared, to compare connections made before and after the group was open.
    pub(crate) fn whenever(self) -> Purpose {
        match self {
            Self::Data { rank, group, flow, .. } => Self::Data { rank, group, flow, opened: false },
            other => other,
        }
    }
}

/// First message, by the listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting(pub(super) [u8; GREETING_BYTES]);

/// Second message, by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opening(pub(super) [u8; OPENING_BYTES]);

/// Last message, by the listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer(pub(super) [u8; ANSWER_BYTES]);

/// A client that has proved to know the key and awaits the answer.
pub(crate) struct Proved {
    pub(crate) purpose: Purpose,
    noise: HandshakeState,
}

/// Outcome of a handshake for the client.
#[derive(Debug)]
pub(crate) enum Verdict {
    Welcome(SessionKeys),
    /// The reason, a sentence that was sealed.
    Refused(String),
    /// Sent in the clear, since the two ends share no key: they are of different jobs.
    OtherJob,
    /// Sent in the clear, since the two ends share no key although they are of one job; or sealed under another key.
    OtherKey,
}

impl Greeting {
    pub(crate) fn new(role: Role) -> io::Result<Self> {
        let mut bytes = start::<GREETING_BYTES>();
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

impl Opening {
    /// Opening for `purpose`, and the client's part of the handshake, which awaits the answer.
    pub(crate) fn new(
        key: &Key,
        tag: JobTag,
        purpose: Purpose,
        greeting: &Greeting,
    ) -> io::Result<(Self, HandshakeState)> {
        let mut bytes = start::<OPENING_BYTES>();
        let (kind, rank, group, flow) = match purpose {
            Purpose::Store => (1, 0, 0, 0),
            Purpose::Control { rank } => (2, rank, 0, 0),
            Purpose::Data { rank, group, flow, opened } => (if opened { 4 } else { 3 }, rank, group, flow),
        };
        bytes[10] = kind;
        bytes[11] = flow;
        bytes[16..24].copy_from_slice(&group.to_le_bytes());
        bytes[24..CLEAR_BYTES].copy_from_slice(&tag);
        let mut noise = begin(key, greeting, &bytes, true).map_err(to_io)?;
        noise.write_message(&rank.to_le_bytes(), &mut bytes[CLEAR_BYTES..]).map_err(to_io)?;
        Ok((Self(bytes), noise))
    }

    pub(crate) fn tag(&self) -> JobTag {
        part(&self.0, 24)
    }

    /// Checks magic and version.
    pub(crate) fn check(&self) -> Result<(), Foreign> {
        check(&self.0)
    }

    /// Decrypts the opening by `key`; `None` if its sender does not know the key, or answers another greeting.
    pub(crate) fn prove(&self, key: &Key, greeting: &Greeting) -> Option<Proved> {
        let mut noise = begin(key, greeting, &self.0, false).ok()?;
        let mut rank = [0; RANK_BYTES];
        noise.read_message(&self.0[CLEAR_BYTES..], &mut rank).ok()?;
        let (rank, group) = (u32::from_le_bytes(rank), u64::from_le_bytes(part(&self.0, 16)));
        let purpose = match (self.0[10], rank, group, self.0[11]) {
            _ if self.0[12..16] != [0; 4] => return None,
            (1, 0, 0, 0) => Purpose::Store,
            (2, rank, 0, 0) => Purpose::Control { rank },
            (kind @ (3 | 4), rank, group, flow) => Purpose::Data { rank, group, flow, opened: kind == 4 },
            _ => return None,
        };
        Some(Proved { purpose, noise })
    }
}

/// Noise state of a connection, bound to its greeting and to the clear bytes of its opening.
fn begin(
    key: &Key,
    greeting: &Greeting,
    opening: &[u8; OPENING_BYTES],
    initiator: bool,
) -> Result<HandshakeState, snow::Error> {
    let prologue = [&greeting.0[..], &opening[..CLEAR_BYTES]].concat();
    noise::handshake(key, &prologue, greeting.role() == Some(Role::Store), initiator)
}

impl Proved {
    /// Sealed answer to this client with the verdict, and the session keys. A long reason is cut to fit.
    pub(crate) fn answer(mut self, verdict: Result<(), &str>) -> io::Result<(Answer, SessionKeys)> {
        let mut said = [0; VERDICT_BYTES];
        if let Err(cause) = verdict {
            said[0] = 1;
            let cause = &cause[..cause.floor_char_boundary(VERDICT_BYTES - 1)];
            said[1..=cause.len()].copy_from_slice(cause.as_bytes());
        }
        let mut bytes = start::<ANSWER_BYTES>();
        self.noise.write_message(&said, &mut bytes[ANSWER_NOISE..]).map_err(to_io)?;
        Ok((Answer(bytes), SessionKeys::of(self.noise)?))
    }
}

impl Answer {
    /// Answer, in the clear, to an opening that was sealed under another key.
    pub(crate) fn unsealed(same_job: bool) -> Self {
        let mut bytes = start::<ANSWER_BYTES>();
        bytes[10] = if same_job { 3 } else { 2 };
        Self(bytes)
    }

    /// Its verdict, if it is the answer to the opening that began `noise`.
    pub(crate) fn verdict(&self, mut noise: HandshakeState) -> Result<Verdict, Foreign> {
        check(&self.0)?;
        match (self.0[10], self.0[11]) {
            (0, 0) => {}
            (2, 0) => return Ok(Verdict::OtherJob),
            (3, 0) => return Ok(Verdict::OtherKey),
            _ => return Err(Foreign::NotOurs),
        }
        let mut said = [0; VERDICT_BYTES];
        // The listener claims to have accepted this end's proof, but has not proved to know the key itself.
        let Ok(_) = noise.read_message(&self.0[ANSWER_NOISE..], &mut said) else { return Ok(Verdict::OtherKey) };
        let text = &said[1..];
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        match said[0] {
            0 => SessionKeys::of(noise).map(Verdict::Welcome).map_err(|_| Foreign::NotOurs),
            1 => Ok(Verdict::Refused(String::from_utf8_lossy(&text[..end]).into_owned())),
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

/// Checks magic and version, the first bytes of every message in every version of the protocol.
fn check(bytes: &[u8]) -> Result<(), Foreign> {
    let Some((start, _)) = bytes.split_first_chunk::<10>() else { return Err(Foreign::NotOurs) };
    match u16::from_le_bytes(part(start, 8)) {
        _ if start[..8] != MAGIC => Err(Foreign::NotOurs),
        PROTOCOL_VERSION => Ok(()),
        other => Err(Foreign::Version(other)),
    }
}

/// True if `bytes`, the beginning of a message, agree with the magic as far as they go.
pub(super) fn begins_like_ours(bytes: &[u8]) -> bool {
    bytes.iter().zip(MAGIC).all(|(byte, ours)| *byte == ours)
}

/// The `N` bytes of `bytes` from `at` on, which must exist.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// The client's part of a handshake: its key and job, the listener that it means to reach, and its purpose.
pub(crate) struct Introduction<'a> {
    pub(crate) key: &'a Key,
    pub(crate) tag: JobTag,
    pub(crate) to: Role,
    pub(crate) purpose: Purpose,
}

/// Reason that a connection failed.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// No answer, or bytes of another protocol: an attempt later, or at another address, may succeed.
    NotOurs(io::Error),
    /// A refusal: another version, another secret, a rank that is already connected.
    Refused(String),
    /// The listener is not the process that was meant: it is another rank, or a process of another job.
    Misdirected(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotOurs(e) if e.kind() == ErrorKind::UnexpectedEof => {
                f.write_str("it closed the connection without an answer")
            }
            Self::NotOurs(e) if e.kind() == ErrorKind::TimedOut => f.write_str("it gave no answer"),
            Self::NotOurs(e) => write!(f, "{e}"),
            Self::Refused(cause) | Self::Misdirected(cause) => f.write_str(cause),
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

/// Part of the text of a refusal, by which callers recognise that the two ends have different secrets.
pub(crate) const OTHER_SECRET: &str = "with another secret";

/// Performs the client's part of the handshake on a fresh, non-blocking connection. Gives up at `until` if the greeting
/// has not come, or the opening is not sent, by then. Afterwards waits for the answer until the time that `answer_by`
/// returns; at that time calls `answer_by` again, and gives up once it returns `None`.
pub(crate) fn introduce(
    socket: Socket,
    me: &Introduction<'_>,
    until: Instant,
    answer_by: impl FnMut() -> Option<Instant>,
) -> Result<SecureStream, Refusal> {
    let greeting = Greeting(read(&socket, by(until))?);
    check(&greeting.0)?;
    match greeting.role() {
        Some(role) if role == me.to => {}
        Some(role) => {
            return Err(Refusal::Misdirected(format!("this is {role}, the connection was meant for {}", me.to)));
        }
        None => return Err(Foreign::NotOurs.into()),
    }
    let (opening, noise) = Opening::new(me.key, me.tag, me.purpose, &greeting)?;
    write(&socket, &opening.0, by(until))?;
    // From here on the listener may have accepted this client: giving up would leave it with a dead connection, because
    // of which it refuses the next one. It answers at once, unless it is stopped or the network is slow.
    let answer = Answer(read(&socket, answer_by)?);
    match answer.verdict(noise)? {
        Verdict::Welcome(keys) => Ok(SecureStream { socket, keys }),
        Verdict::Refused(cause) => Err(Refusal::Refused(cause)),
        Verdict::OtherJob => Err(Refusal::Misdirected(format!("{} there is of another job or restart", me.to))),
        Verdict::OtherKey => Err(Refusal::Refused(format!(
            "{} there was started {OTHER_SECRET}, or the handshake was changed on its way",
            me.to
        ))),
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

/// An `answer_by` for [`introduce`] with a fixed deadline: returns `deadline`, and `None` once it has passed.
pub(crate) fn by(deadline: Instant) -> impl FnMut() -> Option<Instant> {
    move || (Instant::now() < deadline).then_some(deadline)
}

fn read<const N: usize>(mut socket: &Socket, mut until: impl FnMut() -> Option<Instant>) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        match socket.read(&mut bytes[have..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) => ready_after(e, socket, PollFlags::IN, &mut until)?,
        }
    }
    Ok(bytes)
}

fn write(mut socket: &Socket, bytes: &[u8], mut until: impl FnMut() -> Option<Instant>) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        match socket.write(&bytes[sent..]) {
            Ok(n) => sent += n,
            Err(e) => ready_after(e, socket, PollFlags::OUT, &mut until)?,
        }
    }
    Ok(())
}

/// Handles the error `e` of a read or write: after `WouldBlock` waits until the socket may be ready or the time that
/// `until` returns has come. Fails with `TimedOut` once `until` returns `None`.
fn ready_after(
    e: io::Error,
    socket: &Socket,
    flags: PollFlags,
    until: &mut impl FnMut() -> Option<Instant>,
) -> io::Result<()> {
    match e.kind() {
        ErrorKind::Interrupted => Ok(()),
        ErrorKind::WouldBlock => match until() {
            Some(until) => wait(&mut [PollFd::new(socket, flags)], Some(until)).map(drop),
            None => Err(ErrorKind::TimedOut.into()),
        },
        _ => Err(e),
    }
}

/// Keys of both ends of a connection, agreed in a handshake.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn agreed() -> [SessionKeys; 2] {
    let key = Key::new([1; super::hmac_key::KEY_BYTES]);
    let greeting = Greeting::new(Role::Store).expect("random numbers");
    let (opening, noise) = Opening::new(&key, [7; 8], Purpose::Store, &greeting).expect("an opening");
    let (answer, listener) = opening.prove(&key, &greeting).expect("a proof").answer(Ok(())).expect("an answer");
    match answer.verdict(noise) {
        Ok(Verdict::Welcome(client)) => [client, listener],
        other => panic!("{other:?}"),
    }
}

/// All three messages made of any bytes, each read the way its receiver does; the sealed parts also as if the sender
/// knew the key.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    fn filled<const N: usize>(bytes: &mut &[u8], ours: bool) -> [u8; N] {
        let mut message = if ours { start() } else { [0; N] };
        let (said, rest) = bytes.split_at(bytes.len().min(N - 10));
        message[10..10 + said.len()].copy_from_slice(said);
        *bytes = rest;
        message
    }
    // Most inputs get the right magic and version, so that the code behind that check is reached.
    let Some((first, mut rest)) = bytes.split_first() else { return };
    let ours = first % 8 != 0;
    let (greeting, mut opening) = (Greeting(filled(&mut rest, ours)), Opening(filled(&mut rest, ours)));
    let answer = Answer(filled(&mut rest, ours));
    let key = Key::new([7; super::hmac_key::KEY_BYTES]);
    let _ = (check(&greeting.0), greeting.role(), opening.tag(), opening.check(), begins_like_ours(bytes));
    assert!(opening.prove(&key, &greeting).is_none(), "sealed by chance");
    // A client with the key may ask for anything. That takes a hundred times as long as all above, so only one input in
    // 32 does it.
    if bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(*byte)) % 32 != 0 {
        return;
    }
    let rank = [*first; RANK_BYTES];
    let mut client = begin(&key, &greeting, &opening.0, true).expect("a handshake");
    client.write_message(&rank, &mut opening.0[CLEAR_BYTES..]).expect("room");
    if let Some(proved) = opening.prove(&key, &greeting) {
        let (true_answer, _) = proved.answer(Err("no")).expect("an answer");
        if first % 2 == 0 {
            assert!(matches!(true_answer.verdict(client), Ok(Verdict::Refused(cause)) if cause == "no"));
            return;
        }
    }
    assert!(!matches!(answer.verdict(client), Ok(Verdict::Welcome(_) | Verdict::Refused(_))));
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::auth::unauthenticated_connections::Strangers;

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

    /// Results of both ends of a connection to `role` with key 1, which the client makes as `me`.
    fn met(role: Role, me: &Introduction<'_>) -> (Result<SecureStream, Refusal>, Option<(Purpose, SecureStream)>) {
        let (client, listener) = sockets();
        std::thread::scope(|s| {
            let met = s.spawn(move || {
                let mut strangers = Strangers::new(role);
                strangers.receive(listener, None);
                while strangers.deadline().is_some() {
                    if let Some(stranger) = strangers.hear(&[true]).pop() {
                        if let Some(proved) = stranger.prove(&key(1)) {
                            return Some((proved.purpose, stranger.welcome(proved).unwrap()));
                        }
                        let same_job = stranger.tag() == TAG;
                        stranger.turn_away(same_job);
                        return None;
                    }
                    std::thread::yield_now();
                }
                None
            });
            (introduce(client, me, soon(), by(soon())), met.join().unwrap())
        })
    }

    fn opening(purpose: Purpose, greeting: &Greeting) -> (Opening, HandshakeState) {
        Opening::new(&key(1), TAG, purpose, greeting).unwrap()
    }

    #[test]
    fn who_knows_the_key_is_welcome_for_what_it_came_for() {
        let key = key(1);
        for (to, purpose) in [
            (Role::Store, Purpose::Store),
            (Role::Rank(0), Purpose::Control { rank: 3 }),
            (Role::Rank(u32::MAX), Purpose::Data { rank: 3, group: u64::MAX, flow: 9, opened: false }),
            (Role::Rank(0), Purpose::Data { rank: 3, group: 7, flow: 0, opened: true }),
        ] {
            let (said, met) = met(to, &Introduction { key: &key, tag: TAG, to, purpose });
            let (SecureStream { keys: mine, .. }, (came_for, theirs)) = (said.unwrap(), met.unwrap());
            assert_eq!(came_for, purpose);
            let (mut sealed, mut opened) = (Vec::new(), Vec::new());
            mine.seal(0, b"text", &mut sealed).unwrap();
            theirs.keys.open(0, &sealed, &mut opened).unwrap();
            assert_eq!(opened, b"text");
        }
    }

    #[test]
    fn an_answer_is_waited_for_beyond_the_time_for_the_first_word() {
        let (client, mut listener) = sockets();
        let deadline = Instant::now() + Duration::from_millis(50);
        let answered = std::thread::scope(|s| {
            s.spawn(move || {
                let greeting = Greeting::new(Role::Store).unwrap();
                write(&listener, &greeting.0, by(soon())).unwrap();
                let opening = Opening(read(&listener, by(soon())).unwrap());
                opening.check().unwrap();
                std::thread::sleep(HANDSHAKE_DEADLINE + Duration::from_millis(200));
                let (answer, _) = opening.prove(&key(1), &greeting).unwrap().answer(Ok(())).unwrap();
                std::io::Write::write_all(&mut listener, &answer.0).unwrap();
            });
            let key = key(1);
            let me = Introduction { key: &key, tag: TAG, to: Role::Store, purpose: Purpose::Store };
            introduce(client, &me, deadline, by(soon())).is_ok()
        });
        assert!(answered);
    }

    #[test]
    fn an_answer_that_does_not_come_is_waited_for_until_the_deadline_at_most() {
        let (client, listener) = sockets();
        write(&listener, &Greeting::new(Role::Store).unwrap().0, by(soon())).unwrap();
        let (key, begin) = (key(1), Instant::now());
        let me = Introduction { key: &key, tag: TAG, to: Role::Store, purpose: Purpose::Store };
        let deadline = begin + Duration::from_millis(50);
        let refusal = introduce(client, &me, begin, by(deadline)).unwrap_err();
        assert!(matches!(&refusal, Refusal::NotOurs(e) if e.kind() == ErrorKind::TimedOut), "{refusal}");
        assert!(begin.elapsed() < HANDSHAKE_DEADLINE, "{:?}", begin.elapsed());
    }

    #[test]
    fn whoever_waits_for_an_answer_is_asked_again_and_again_how_long() {
        let (client, listener) = sockets();
        write(&listener, &Greeting::new(Role::Store).unwrap().0, by(soon())).unwrap();
        let key = key(1);
        let me = Introduction { key: &key, tag: TAG, to: Role::Store, purpose: Purpose::Store };
        let mut times = (0..3).map(|_| Instant::now() + Duration::from_millis(10));
        let mut asked = 0;
        let answer_by = || {
            asked += 1;
            times.next()
        };
        let refusal = introduce(client, &me, soon(), answer_by).unwrap_err();
        assert!(matches!(&refusal, Refusal::NotOurs(e) if e.kind() == ErrorKind::TimedOut), "{refusal}");
        assert_eq!(asked, 4);
    }

    #[test]
    fn another_secret_job_or_door_is_told_apart() {
        let (ours, other) = (key(1), key(2));
        let store = Introduction { key: &other, tag: TAG, to: Role::Store, purpose: Purpose::Store };
        let refused = |role, me: &Introduction<'_>| match met(role, me) {
            (Err(Refusal::Refused(cause) | Refusal::Misdirected(cause)), None) => cause,
            (said, met) => panic!("{said:?} {met:?}"),
        };
        assert!(refused(Role::Store, &store).contains("another secret"));
        assert!(refused(Role::Store, &Introduction { tag: [8; 8], ..store }).contains("another job"));
        let cause = refused(Role::Rank(2), &Introduction { key: &ours, ..store });
        assert!(cause.contains("this is rank 2") && cause.contains("the store"), "{cause}");
    }

    #[test]
    fn an_opening_is_worth_nothing_elsewhere() {
        let greeting = Greeting::new(Role::Rank(1)).unwrap();
        let (sent, _) = opening(Purpose::Control { rank: 2 }, &greeting);
        assert_eq!(sent.prove(&key(1), &greeting).unwrap().purpose, Purpose::Control { rank: 2 });
        assert!(sent.prove(&key(2), &greeting).is_none());
        // Replayed later.
        assert!(sent.prove(&key(1), &Greeting::new(Role::Rank(1)).unwrap()).is_none());
        // With any bit of the greeting changed (the rank that is dialled, the nonce), or of itself (purpose, group,
        // job, the sealed rank).
        for bit in 0..8 * GREETING_BYTES {
            let mut changed = greeting;
            changed.0[bit / 8] ^= 1 << (bit % 8);
            assert!(sent.prove(&key(1), &changed).is_none(), "bit {bit} of the greeting");
        }
        for bit in 0..8 * OPENING_BYTES {
            let mut changed = sent;
            changed.0[bit / 8] ^= 1 << (bit % 8);
            // X25519 ignores the highest bit of a key, but its hash does not.
            assert!(changed.prove(&key(1), &greeting).is_none(), "bit {bit} of the opening");
        }
    }

    #[test]
    fn an_answer_counts_for_its_opening_and_unchanged() {
        let greeting = Greeting::new(Role::Store).unwrap();
        let long = "ü".repeat(200);
        for (verdict, expected) in [(Err("no"), "no".to_owned()), (Err(&long[..]), "ü".repeat(97))] {
            let (sent, noise) = opening(Purpose::Store, &greeting);
            let (answer, _) = sent.prove(&key(1), &greeting).unwrap().answer(verdict).unwrap();
            assert!(matches!(answer.verdict(noise), Ok(Verdict::Refused(cause)) if cause == expected));
            let (_, again) = opening(Purpose::Store, &greeting);
            assert!(matches!(answer.verdict(again), Ok(Verdict::OtherKey)), "replayed");
        }
        let fixed = |sent: &Opening| sent.prove(&key(1), &greeting).unwrap().answer(Ok(())).unwrap().0;
        for bit in 0..8 * ANSWER_BYTES {
            let (sent, noise) = opening(Purpose::Store, &greeting);
            let mut changed = fixed(&sent);
            changed.0[bit / 8] ^= 1 << (bit % 8);
            let verdict = changed.verdict(noise);
            assert!(!matches!(verdict, Ok(Verdict::Welcome(_) | Verdict::Refused(_))), "bit {bit}: {verdict:?}");
        }
        // The client's own opening, sent back to it.
        let (sent, noise) = opening(Purpose::Store, &greeting);
        let mut mirrored = start::<ANSWER_BYTES>();
        mirrored[ANSWER_NOISE..ANSWER_NOISE + OPENING_BYTES - CLEAR_BYTES].copy_from_slice(&sent.0[CLEAR_BYTES..]);
        assert!(matches!(Answer(mirrored).verdict(noise), Ok(Verdict::OtherKey)));
        for (same_job, expected) in [(true, "OtherKey"), (false, "OtherJob")] {
            let (_, noise) = opening(Purpose::Store, &greeting);
            assert_eq!(format!("{:?}", Answer::unsealed(same_job).verdict(noise).unwrap()), expected);
        }
    }

    #[test]
    fn other_versions_and_protocols_are_told_apart() {
        let said = |bytes: &[u8]| {
            let (client, listener) = sockets();
            (&listener).write_all(bytes).unwrap();
            drop(listener);
            let key = key(1);
            let me = Introduction { key: &key, tag: TAG, to: Role::Store, purpose: Purpose::Store };
            introduce(client, &me, soon(), by(soon())).unwrap_err()
        };
        let mut newer = Greeting::new(Role::Store).unwrap().0;
        newer[8] = 77;
        let text = said(&newer).to_string();
        assert!(text.contains(&format!("version {PROTOCOL_VERSION} here, 77 there")), "{text}");
        let mut other = Greeting::new(Role::Store).unwrap().0;
        other[0] = b'B';
        for bytes in
            [&other[..], b"", b"burn-ddp", b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"]
        {
            assert!(matches!(said(bytes), Refusal::NotOurs(_)), "{bytes:?}");
        }
        let (mut sent, _) = opening(Purpose::Store, &Greeting(other));
        sent.0[8] = 77;
        assert_eq!(sent.check(), Err(Foreign::Version(77)));
    }
}
