//! Collectives on any serde value. The encoded sizes travel first, then the encoded bytes.

use std::panic::Location;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ProcessGroup;
use crate::call::call_arguments::{Request, refuse};
use crate::call::{Call, Collective};
use crate::engine::Engine;
use crate::{Error, Result};

/// Largest value that a collective carries, in bytes of its encoded form.
pub const MAX_OBJECT_BYTES: u64 = 256 * 1024 * 1024;

/// Stands for the size of a value on a rank that has no bytes to send.
const NO_VALUE: u64 = u64::MAX;

impl ProcessGroup {
    /// Copies the root's value to all ranks.
    ///
    /// The root passes `Some`; values that other ranks pass are dropped. Each rank gets the root's value. All ranks use
    /// the same type; the encoded value has at most [`MAX_OBJECT_BYTES`]. Blocks. Costs two steps: each rank
    /// sends 8 bytes, a size, to each other rank; then the root sends the encoded value to each other rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], on all ranks and leaving the group usable, if the root
    /// passed `None` or a value that cannot be encoded or is too large. [`Error::Object`] if the bytes do not decode as
    /// a `V`.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let name = (world.rank() == 0).then(|| "run-17".to_string());
    ///     assert_eq!(group.broadcast_object(name, 0)?, "run-17");
    ///     assert!(group.broadcast_object(None::<String>, 0).unwrap_err().group_usable());
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn broadcast_object<V: Serialize + DeserializeOwned>(&self, value: Option<V>, root: usize) -> Result<V> {
        let caller = self.in_turn(Location::caller());
        let request = Request { root: Some(root), ..Request::bare(Collective::BroadcastObject, caller) };
        self.calls.call(request, |engine, call| {
            self.calls.check_root(root)?;
            let value = value.filter(|_| self.rank() == root);
            let encoded = match &value {
                Some(value) => encode(value),
                None if self.rank() == root => Err("the root passed None".to_string()),
                None => Ok(Vec::new()),
            };
            let sizes = self.exchange_sizes(engine, call, &encoded)?;
            let mut bytes = match encoded {
                Ok(bytes) if self.rank() == root => bytes,
                _ => vec![0; sizes[root]],
            };
            engine.broadcast(&call.next_stage(), &mut bytes, root)?;
            value.map_or_else(|| self.decode(root, &bytes), Ok)
        })
    }

    /// Collects the values of all ranks on every rank.
    ///
    /// Each rank passes a value; each gets the values of all ranks, in rank order. All ranks use the same type; encoded
    /// sizes may differ, up to [`MAX_OBJECT_BYTES`] each. Blocks. Costs two steps: each rank sends 8 bytes, its size,
    /// to each other rank; then it sends its encoded value to each other rank.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], on all ranks and leaving the group usable, if a value
    /// cannot be encoded or is too large. [`Error::Object`] if a peer's bytes do not decode as a `V`.
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     let lists = group.all_gather_object(&vec![world.rank(); world.rank()])?;
    ///     assert_eq!(lists, [vec![], vec![1], vec![2, 2]]);
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather_object<V: Serialize + DeserializeOwned>(&self, value: &V) -> Result<Vec<V>> {
        let caller = self.in_turn(Location::caller());
        self.calls.call(Request::bare(Collective::AllGatherObject, caller), |engine, call| {
            let encoded = encode(value);
            let sizes = self.exchange_sizes(engine, call, &encoded)?;
            let mut values: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
            let mut outputs: Vec<&mut [u8]> = values.iter_mut().map(Vec::as_mut_slice).collect();
            engine.all_gather(&call.next_stage(), &encoded.unwrap_or_default(), &mut outputs)?;
            values.iter().enumerate().map(|(from, bytes)| self.decode(from, bytes)).collect()
        })
    }

    /// Encoded sizes of all ranks' values, in bytes. All ranks see the same sizes, so all refuse the call or none does.
    fn exchange_sizes(
        &self,
        engine: &mut dyn Engine,
        call: &Call,
        mine: &Result<Vec<u8>, String>,
    ) -> Result<Vec<usize>> {
        let size = mine.as_ref().map_or(NO_VALUE, |bytes| bytes.len() as u64);
        let mut sizes = vec![[0; 8]; self.world_size()];
        let mut outputs: Vec<&mut [u8]> = sizes.iter_mut().map(|size| size.as_mut_slice()).collect();
        engine.all_gather(call, &size.to_le_bytes(), &mut outputs)?;
        let sizes: Vec<u64> = sizes.into_iter().map(u64::from_le_bytes).collect();

        let Some(rank) = sizes.iter().position(|size| *size > MAX_OBJECT_BYTES) else {
            return Ok(sizes.into_iter().map(|size| size as usize).collect());
        };
        let why = match mine {
            Err(why) if rank == self.rank() => format!("has no value to send: {why}"),
            _ if sizes[rank] == NO_VALUE => "has no value to send; that rank's error says why".to_string(),
            _ => format!("passed a value of {} bytes; at most {MAX_OBJECT_BYTES} travel", sizes[rank]),
        };
        let rank = self.ranks()[rank];
        refuse(format!("rank {rank} {why}")).map_err(|error| error.blaming(rank))
    }

    fn decode<V: DeserializeOwned>(&self, from: usize, bytes: &[u8]) -> Result<V> {
        decode(bytes).map_err(|message| {
            let hint = format!("invalid {}: {message}; do all ranks use the same type?", std::any::type_name::<V>());
            Error::Object { rank: self.ranks()[self.rank()], from: self.ranks()[from], message: hint, during: None }
        })
    }
}

/// Decodes a value from all of `bytes`.
pub(crate) fn decode<V: DeserializeOwned>(bytes: &[u8]) -> Result<V, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(format!("{} of its {} bytes are left over", rest.len(), bytes.len())),
        Err(error) => Err(error.to_string()),
    }
}

fn encode<V: Serialize>(value: &V) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(value).map_err(|error| error.to_string())
}
