//! A relay between the ranks and the store where they meet, without the job's secret: under MPICH's mpirun and under
//! `burnrun --hostfile`. A relay that only passes bytes on reads nothing, and the job trains as without it; where it
//! flips a bit, the job ends with an error.
#![cfg(target_os = "linux")]

mod burnrun_hosts;
mod mpirun;
#[path = "../../../burn-ddp/comm/tests/common/recording_relay.rs"]
mod recording_relay;

use burn_ddp_tests::job::{self, line, rank_program, stderr, stdout};
use recording_relay::Side;

const RANK: &str = env!("CARGO_BIN_EXE_rank");
/// Join timeout, in seconds, of jobs in which a rank cannot join.
const SOON: &str = "15";

/// A flipped bit: the side and the byte of its stream, and a part of the error that it leads to.
type Flip = (Side, usize, &'static str);

/// Bits in each message of the handshake and in the first record of each side.
const FLIPS: [Flip; 6] = [
    // The opening: the tag of the job, and the sealed rank.
    (Side::Client, 27, "of another job or restart"),
    (Side::Client, 80, "the handshake was changed on its way"),
    // The first record.
    (Side::Client, 84 + 5, "it closed the connection without an answer"),
    // The nonce of the greeting, and the sealed verdict of the answer.
    (Side::Store, 20, "the handshake was changed on its way"),
    (Side::Store, 48 + 100, "the handshake was changed on its way"),
    // The first record.
    (Side::Store, 48 + 256 + 5, "its bytes were changed on their way"),
];

/// The hash of the parameters after a training of two ranks without a relay.
fn hash_without_relay() -> String {
    let ranks = job::job(&rank_program(RANK), 2, &["train", "sgd"]);
    assert!(ranks.iter().all(|rank| rank.status.success()), "{}", stderr(&ranks[0]));
    line(&stdout(&ranks[0]), "hash ").to_owned()
}
