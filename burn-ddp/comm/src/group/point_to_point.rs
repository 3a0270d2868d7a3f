//! Send and receive: calls of two ranks of a group.

use std::panic::Location;

use super::ProcessGroup;
#[cfg(doc)]
use crate::Error;
use crate::dtype::Element;
use crate::{DType, Result};

impl ProcessGroup {
    /// Sends a buffer to one other rank, which calls [`recv`](Self::recv).
    ///
    /// Returns when the other has it. Only the two take part, and their calls are compared like those of a collective:
    /// type and length must be alike, and between two ranks everything happens in one order, so that a `send` that
    /// meets a collective, or another `send`, is an error that shows both calls; between machines that share memory
    /// inside (`shm+tcp`) it may be one at the deadline.
    ///
    /// # Errors
    /// Those of all collectives. [`Error::InvalidArgument`], which leaves the group usable, if
    /// there is no such rank or it is this one.
    ///
    /// ```
    /// use burn_ddp_comm::{Error, World};
    ///
    /// let results = World::spawn(3, |world| {
    ///     let group = world.group()?;
    ///     match world.rank() {
    ///         0 => group.send(&[1.5, 2.5], 2)?,
    ///         1 => {} // it is not concerned
    ///         _ => {
    ///             let mut x = [0.0; 2];
    ///             group.recv(&mut x, 0)?;
    ///             assert_eq!(x, [1.5, 2.5]);
    ///         }
    ///     }
    ///     group.barrier()?;
    ///     // Two ranks that both send first do not wait for each other in vain.
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
    /// Those of [`send`](Self::send); [`Error::InvalidArgument`] also for a part of an element.
    ///
    /// # Example
    ///
    /// As in [`DType`].
    #[track_caller]
    pub fn send_bytes(&self, dtype: DType, buf: &[u8], to: usize) -> Result<()> {
        self.calls.transfer(self.in_turn(Location::caller()), dtype, Some((to, buf)), None)
    }

    /// Fills a buffer with what one other rank [sends](Self::send).
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
    /// Those of [`recv`](Self::recv); [`Error::InvalidArgument`] also for a part of an element.
    ///
    /// # Example
    ///
    /// As in [`DType`].
    #[track_caller]
    pub fn recv_bytes(&self, dtype: DType, buf: &mut [u8], from: usize) -> Result<()> {
        self.calls.transfer(self.in_turn(Location::caller()), dtype, None, Some((from, buf)))
    }

    /// Sends to one rank and receives from one, at the same time.
    ///
    /// With two different ranks it fits to a [`send`](Self::send), a [`recv`](Self::recv) and a `send_recv` of theirs;
    /// with one, that one calls `send_recv` too. A rank may pass itself as both: then it is a copy. Returns when all
    /// has arrived.
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
    /// Those of [`send_recv`](Self::send_recv); [`Error::InvalidArgument`] also for a part of
    /// an element.
    ///
    /// # Example
    ///
    /// As in [`DType`].
    #[track_caller]
    pub fn send_recv_bytes(&self, dtype: DType, send: &[u8], to: usize, receive: &mut [u8], from: usize) -> Result<()> {
        self.calls.transfer(self.in_turn(Location::caller()), dtype, Some((to, send)), Some((from, receive)))
    }
}
