//! Send and receive: calls that only two ranks of a group make.

use std::panic::Location;

use super::ProcessGroup;
#[cfg(doc)]
use crate::Error;
use crate::dtype::Element;
use crate::{DType, Result, TensorType};

impl ProcessGroup {
    /// Sends a buffer to one other rank, which calls [`recv`](Self::recv).
    ///
    /// Blocks until the other rank has the buffer. Only these two ranks take part, and they compare their calls like
    /// those of a collective: type and length must be the same. Both ranks make their calls in the same order: a `send`
    /// that meets a collective, or another `send`, is an error that shows both calls; on the engine `shm+tcp` this
    /// error may come only at the deadline. Costs two steps: the buffer travels once, then the receiver confirms it.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if `to` is not a rank of
    /// the group or is this rank.
    ///
    /// ```
    /// use burn_ddp_comm::{Error, World};
    ///
    /// let results = World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     match world.rank() {
    ///         0 => group.send(&[1.5, 2.5], 2)?,
    ///         1 => {} // takes no part
    ///         _ => {
    ///             let mut x = [0.0; 2];
    ///             group.recv(&mut x, 0)?;
    ///             assert_eq!(x, [1.5, 2.5]);
    ///         }
    ///     }
    ///     group.barrier()?;
    ///     // Ranks 0 and 1 both send and none receives: they do not hang, but get an error.
    ///     if world.rank() < 2 { group.send(&[1_u8], 1 - world.rank()) } else { group.barrier() }
    /// });
    /// assert!(results.iter().all(|result| matches!(result, Err(Error::Mismatch { .. }))));
    /// ```
    #[track_caller]
    pub fn send<T: Element>(&self, buf: &[T], to: usize) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        self.calls.transfer(caller, T::DTYPE, Some((to, T::bytes(buf))), None)
    }

    /// [`send`](Self::send) of the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`send`](Self::send); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn send_bytes(&self, elements: impl Into<TensorType>, buf: &[u8], to: usize) -> Result<()> {
        self.calls.transfer(self.in_turn(Location::caller()), elements, Some((to, buf)), None)
    }

    /// Fills a buffer with the elements that one other rank [sends](Self::send).
    ///
    /// Both ranks pass buffers of the same type and length; afterwards `buf` holds the elements of rank `from`. Blocks
    /// until they have arrived. Costs what `send` costs: in the second step this rank sends its confirmation.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// World::spawn(2, |world| {
    ///     let group = world.group()?;
    ///     let mut token = [world.rank() as i64];
    ///     if world.rank() == 0 { group.send(&[7_i64], 1)? } else { group.recv(&mut token, 0)? }
    ///     assert_eq!(token, if world.rank() == 0 { [0] } else { [7] });
    ///     assert!(group.recv(&mut token, 2).unwrap_err().group_usable()); // there is no rank 2
    ///     Ok::<_, burn_ddp_comm::Error>(())
    /// }).into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    #[track_caller]
    pub fn recv<T: Element>(&self, buf: &mut [T], from: usize) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(buf, |bytes| self.calls.transfer(caller, T::DTYPE, None, Some((from, bytes))))
    }

    /// [`recv`](Self::recv) of the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn recv_bytes(&self, elements: impl Into<TensorType>, buf: &mut [u8], from: usize) -> Result<()> {
        self.calls.transfer(self.in_turn(Location::caller()), elements, None, Some((from, buf)))
    }

    /// Sends to one rank and receives from one, at the same time.
    ///
    /// If `to` and `from` are different ranks, rank `to` must [`recv`](Self::recv) from this rank and rank `from` must
    /// [`send`](Self::send) to it; a `send_recv` of theirs with a third rank does that, too. If they are the same rank,
    /// that rank calls `send_recv` with this one. A rank may pass itself as both: then `send` is copied to `receive`.
    /// Afterwards `receive` holds the elements of rank `from`. Blocks until both buffers have arrived. Costs the two
    /// steps of a `send` and those of a `recv` at the same time.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    ///
    /// ```
    /// use burn_ddp_comm::World;
    ///
    /// // Around a ring, of any number of ranks.
    /// let got = World::spawn(4, |world| {
    ///     let group = world.group()?;
    ///     let (rank, n) = (world.rank(), world.world_size());
    ///     let mut x = [0];
    ///     group.send_recv(&[rank as i32], (rank + 1) % n, &mut x, (rank + n - 1) % n)?;
    ///     Ok::<_, burn_ddp_comm::Error>(x[0])
    /// });
    /// assert_eq!(got, [Ok(3), Ok(0), Ok(1), Ok(2)]);
    /// ```
    #[track_caller]
    pub fn send_recv<T: Element>(&self, send: &[T], to: usize, receive: &mut [T], from: usize) -> Result<()> {
        let caller = self.in_turn(Location::caller());
        T::edit(receive, |room| self.calls.transfer(caller, T::DTYPE, Some((to, T::bytes(send))), Some((from, room))))
    }

    /// [`send_recv`](Self::send_recv) of the bytes of `dtype` elements.
    ///
    /// # Errors
    /// Those of [`send_recv`](Self::send_recv); [`Error::InvalidArgument`] also if the bytes are not whole elements.
    ///
    /// # Example
    ///
    /// As in [`DType`](crate::DType).
    #[track_caller]
    pub fn send_recv_bytes(&self, dtype: DType, send: &[u8], to: usize, receive: &mut [u8], from: usize) -> Result<()> {
        self.calls.transfer(self.in_turn(Location::caller()), dtype, Some((to, send)), Some((from, receive)))
    }
}
