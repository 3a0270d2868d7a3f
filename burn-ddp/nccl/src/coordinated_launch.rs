//! Launches that the ranks of one group coordinate: they compare the call, agree on the order of launches, and call
//! NCCL.

use std::sync::Arc;
use std::time::Duration;

use burn_ddp_comm::engine::Engine;
use burn_ddp_comm::{Call, Error, Result};

use crate::communicator::{Closed, Communicator, SharedCommunicator, abort};
use crate::error::DeviceError;
use crate::nccl::{UNIQUE_ID_BYTES, UniqueId};
use crate::poison_free_lock::lock;
use crate::rank_device_state::RankDevice;
use crate::stream::Stream;
use crate::wait::WaitCheck;

/// Time between two checks of the world while a call waits for its turn to launch. The turn ends the wait at once.
const TURN: Duration = Duration::from_millis(20);

/// One rank's side of a group that launches collectives on devices.
pub(crate) struct GroupLaunch {
    /// Host engine, over which the ranks coordinate.
    pub(crate) host: Box<dyn Engine>,
    pub(crate) rank_device: Arc<RankDevice>,
    /// This rank in the group.
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) communicator: SharedCommunicator,
    /// The end of the communicator whose launch failed.
    pub(crate) failed: Option<Closed>,
}

impl GroupLaunch {
    pub(crate) fn new(host: Box<dyn Engine>, rank_device: Arc<RankDevice>, call: &Call) -> Result<GroupLaunch> {
        let (rank, size) = (call.group_rank()?, call.members.count());
        Ok(GroupLaunch { host, rank_device, rank, size, communicator: SharedCommunicator::default(), failed: None })
    }

    /// Waits until all ranks are in this call, and returns their weights. Fails on all ranks if `cut` differs between
    /// them.
    pub(crate) fn meet(&mut self, call: &Call, cut: u64) -> Result<Vec<f64>> {
        let mine = [call.weight.to_le_bytes(), cut.to_le_bytes()].concat();
        let rows = self.all_gather(call, &mine)?;
        // All ranks have the same rows, so all return this error.
        if let Some(odd) = rows.iter().position(|row| row[8..] != rows[0][8..]) {
            let (first, odd) = (call.world_rank(0), call.world_rank(odd));
            let message = format!(
                "rank {odd} passed its elements in other pieces than rank {first}: all ranks must cut them alike"
            );
            return Err(Error::InvalidArgument { message, rank: Some(odd), during: None });
        }
        Ok(rows.iter().map(|row| f64::from_bits(number(row))).collect())
    }

    /// Enqueues `work` when it is this call's turn among the calls of the device. All ranks have passed
    /// [`meet`](Self::meet).
    pub(crate) fn launch(
        &mut self,
        call: &Call,
        work: &mut dyn FnMut(&mut Communicator, &Stream, WaitCheck<'_>) -> Result<(), DeviceError>,
    ) -> Result<()> {
        let rank_device = self.rank_device.clone();
        let check = || rank_device.check(call);
        let turn = rank_device.launch_order.propose(call.info.group);
        let mut mine = turn.proposal.to_le_bytes().to_vec();
        let first = lock(&self.communicator).is_none();
        if first {
            let id = match self.rank {
                0 => rank_device.nccl.unique_id().map_err(|why| rank_device.error(DeviceError::Library(why)))?,
                _ => UniqueId([0; UNIQUE_ID_BYTES]),
            };
            mine.extend_from_slice(&id.0);
        }
        let rows = self.all_gather(&call.next_stage(), &mine)?;
        turn.agree(rows.iter().map(|row| number(row)).max().unwrap_or(turn.proposal));
        while !turn.wait(TURN) {
            check()?;
        }
        let shared = self.communicator.clone();
        let mut shared = lock(&shared);
        let ready = match shared.as_mut() {
            Some(communicator) => Ok(communicator),
            None if first => self.new_communicator(&rows[0], &check).map(|communicator| shared.insert(communicator)),
            None => Err(DeviceError::Library("the communicator of the group was aborted".to_owned())),
        };
        let launched = ready.and_then(|communicator| work(communicator, &rank_device.stream, &check));
        launched.map_err(|error| {
            if let Some(mut communicator) = shared.take() {
                self.failed = Some(communicator.closed());
                communicator.give_up();
            }
            rank_device.error(error)
        })
    }

    /// Gathers `mine`, of one length on all ranks, over the host engine, which compares the calls.
    fn all_gather(&mut self, call: &Call, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut rows = vec![vec![0; mine.len()]; self.size];
        let mut outputs: Vec<&mut [u8]> = rows.iter_mut().map(Vec::as_mut_slice).collect();
        self.host.all_gather(call, mine, &mut outputs)?;
        Ok(rows)
    }

    /// Makes the communicator, in the turn of its call: this may wait for the device, and so for kernels that wait for
    /// other ranks.
    fn new_communicator(&self, first_row: &[u8], check: WaitCheck<'_>) -> Result<Communicator, DeviceError> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        let sent = first_row.get(8..).filter(|id| id.len() == UNIQUE_ID_BYTES);
        id.0.copy_from_slice(sent.ok_or("rank 0 of the group sent no unique id".to_owned())?);
        let RankDevice { nccl, device, .. } = &*self.rank_device;
        Communicator::init((nccl, device), id, (self.rank, self.size), false, check)
    }
}

/// Number in the first 8 bytes of a row.
fn number(row: &[u8]) -> u64 {
    row.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Aborts the communicator if the world has ended: the other ranks will not finalize it together with this rank.
impl Drop for GroupLaunch {
    fn drop(&mut self) {
        if self.rank_device.membership.check().is_err() {
            abort(&self.communicator);
        }
    }
}
