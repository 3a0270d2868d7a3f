//! Groups of some of a group's ranks.

use std::panic::Location;

use super::ProcessGroup;
use crate::call::call_arguments::Request;
use crate::call::{Collective, GroupId, Members};
use crate::{Error, Result};

/// Request of one rank in a split: its color, its key, and the number of the new group if this rank is the first in
/// it (the leader).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Wish {
    color: Option<u64>,
    key: i64,
    number: u64,
}

const WISH_BYTES: usize = 32;

impl ProcessGroup {
    /// Divides the group: ranks that pass the same color get a group of their own, ranks that pass `None` get `None`.
    ///
    /// All ranks of this group call it. The ranks of a new group are in the order of their keys, ranks with equal keys
    /// in the order of this group. The groups are independent of each other and of this one: several threads may use
    /// them at the same time, and no call on one waits for a call on another. A rank that fails ends the world, and so
    /// all groups. Blocks. Costs one step, in which each rank sends 32 bytes to each other rank of this group; after
    /// that, each new group costs its ranks what [`World::group`](crate::World::group) costs.
    ///
    /// # Errors
    /// Those of all collectives.
    ///
    /// ```
    /// use burn_ddp_comm::{ReduceOp, World};
    ///
    /// // Even and odd ranks, the highest first; rank 4 is in neither group.
    /// World::spawn(5, |world| {
    ///     let group = world.group()?;
    ///     let color = (world.rank() < 4).then_some(world.rank() as u64 % 2);
    ///     let Some(half) = group.split(color, -(world.rank() as i64))? else {
    ///         assert_eq!(world.rank(), 4);
    ///         return Ok(());
    ///     };
    ///     assert_eq!(half.ranks(), if world.rank() % 2 == 0 { [2, 0] } else { [3, 1] });
    ///     let mut x = [world.rank() as i32];
    ///     half.all_reduce(&mut x, ReduceOp::Sum)?;
    ///     assert_eq!(x, if world.rank() % 2 == 0 { [2] } else { [4] });
    ///     half.broadcast(&mut x, 0)?; // the first of the half, rank 2 or 3 of the world
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<ProcessGroup>> {
        let caller = self.in_turn(Location::caller());
        let mine = Wish { color, key, number: self.calls.member.sub_group_number() };
        let wishes = self.calls.call(Request::bare(Collective::Split, caller), |engine, call| {
            let mut received = vec![[0; WISH_BYTES]; self.world_size()];
            let mut outputs: Vec<&mut [u8]> = received.iter_mut().map(|wish| wish.as_mut_slice()).collect();
            engine.all_gather(call, &mine.encode(), &mut outputs)?;
            let read = |(rank, bytes)| Wish::decode(bytes).ok_or_else(|| self.unreadable(rank));
            received.iter().enumerate().map(read).collect::<Result<Vec<Wish>>>()
        })?;
        let Some(ranks) = members(&wishes, color) else { return Ok(None) };
        let first = ranks[0];
        let leader = self.calls.members.world_rank(first);
        let number = u32::try_from(wishes[first].number).map_err(|_| Error::InvalidArgument {
            message: format!("rank {leader} cannot lead another sub-group: it has used all numbers for them"),
            rank: Some(leader),
            during: None,
        })?;
        let ranks: Vec<usize> = ranks.into_iter().map(|rank| self.calls.members.world_rank(rank)).collect();
        let id = GroupId::led_by(leader, number);
        let mut group = self.calls.member.open_group(id.0, Members::new(ranks), caller.site)?;
        group.site = self.site;
        Ok(Some(group))
    }

    fn unreadable(&self, rank: usize) -> Error {
        let message = "its color and key for a split cannot be decoded".to_string();
        Error::Protocol { peer: self.calls.members.world_rank(rank), message, during: None }
    }
}

/// The ranks that pass `color`, in the order of their new group; `None` if `color` is `None` or no rank passes it.
fn members(wishes: &[Wish], color: Option<u64>) -> Option<Vec<usize>> {
    color?;
    let mut ranks: Vec<usize> = (0..wishes.len()).filter(|rank| wishes[*rank].color == color).collect();
    ranks.sort_by_key(|rank| (wishes[*rank].key, *rank));
    (!ranks.is_empty()).then_some(ranks)
}

impl Wish {
    fn encode(&self) -> [u8; WISH_BYTES] {
        let mut bytes = [0; WISH_BYTES];
        let fields = [u64::from(self.color.is_some()), self.color.unwrap_or(0), self.key as u64, self.number];
        for (field, place) in fields.iter().zip(bytes.chunks_exact_mut(8)) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; WISH_BYTES]) -> Option<Wish> {
        let mut fields = [0; 4];
        for (field, place) in fields.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *field = u64::from_le_bytes(*place);
        }
        let [wanted, color, key, number] = fields;
        let color = match wanted {
            0 => None,
            1 => Some(color),
            _ => return None,
        };
        Some(Wish { color, key: key as i64, number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_round_trips() {
        for color in [None, Some(0), Some(u64::MAX)] {
            let wish = Wish { color, key: i64::MIN, number: 77 };
            assert_eq!(Wish::decode(&wish.encode()), Some(wish));
        }
        assert_eq!(Wish::decode(&[9; WISH_BYTES]), None);
    }

    #[test]
    fn members_are_in_the_order_of_their_keys() {
        let wish = |color, key| Wish { color, key, number: 0 };
        let wishes = [wish(Some(1), 5), wish(None, 0), wish(Some(1), -5), wish(Some(2), 0), wish(Some(1), 5)];
        assert_eq!(members(&wishes, Some(1)), Some(vec![2, 0, 4]));
        assert_eq!(members(&wishes, Some(2)), Some(vec![3]));
        assert_eq!(members(&wishes, None), None);
    }
}
