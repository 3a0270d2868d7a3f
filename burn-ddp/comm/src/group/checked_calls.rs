//! Checks each collective's arguments on this rank, then hands the call to the engine. The checks run inside the call's
//! turn, so a refused call is counted and recorded, too.

use super::CallPath;
use crate::call::Collective;
use crate::call::call_arguments::{Caller, ON_DEVICE, Request, check_op, check_rows, check_whole, digest, refuse};
use crate::dtype::Element;
use crate::engine::{OnDevice, OwnLeaves, reduce_leaf_rows};
use crate::tensor_type::TensorType;
use crate::{DType, ReduceOp, Result, RowDivision, SharedBuffer, SharedView};

impl CallPath {
    pub(crate) fn barrier(&self, caller: Caller) -> Result<()> {
        self.call(Request::bare(Collective::Barrier, caller), |engine, call| engine.barrier(call))
    }

    pub(crate) fn all_reduce(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        buf: &mut [u8],
        op: ReduceOp,
        tag: u64,
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request =
            Request { reduce: Some(op), tag, ..Request::elements(Collective::AllReduce, elements, buf.len(), caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(op, dtype)?;
            engine.all_reduce(call, dtype, buf, op)
        })
    }

    pub(crate) fn all_reduce_weighted(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        buf: &mut [u8],
        weight: f64,
        tag: u64,
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request =
            Request { weight, tag, ..Request::elements(Collective::AllReduceWeighted, elements, buf.len(), caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(ReduceOp::Mean, dtype)?;
            engine.all_reduce_weighted(call, dtype, buf)
        })
    }

    pub(crate) fn shared_buffers(&self, caller: Caller, lens_bytes: &[usize]) -> Result<Vec<SharedBuffer>> {
        let digest = digest(lens_bytes.iter().map(|len| *len as u64));
        let total = lens_bytes.iter().sum();
        let request = Request { digest, ..Request::elements(Collective::SharedBuffers, DType::U8, total, caller) };
        self.call(request, |engine, call| engine.shared_buffers(call, lens_bytes))
    }

    pub(crate) fn all_reduce_shared(
        &self,
        caller: Caller,
        dtype: DType,
        buffer: &mut SharedBuffer,
        op: ReduceOp,
        tag: u64,
    ) -> Result<SharedView> {
        let len = buffer.len_bytes();
        let request = Request { reduce: Some(op), tag, ..Request::elements(Collective::AllReduce, dtype, len, caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, len)?;
            check_op(op, dtype)?;
            engine.all_reduce_shared(call, dtype, buffer, Some(op))
        })
    }

    pub(crate) fn all_reduce_weighted_shared(
        &self,
        caller: Caller,
        dtype: DType,
        buffer: &mut SharedBuffer,
        weight: f64,
        tag: u64,
    ) -> Result<SharedView> {
        let len = buffer.len_bytes();
        let request = Request { weight, tag, ..Request::elements(Collective::AllReduceWeighted, dtype, len, caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, len)?;
            check_op(ReduceOp::Mean, dtype)?;
            engine.all_reduce_shared(call, dtype, buffer, None)
        })
    }

    pub(crate) fn all_reduce_leaves_shared(
        &self,
        caller: Caller,
        dtype: DType,
        buffer: &mut SharedBuffer,
        own: OwnLeaves<'_>,
        tag: u64,
    ) -> Result<SharedView> {
        let rows = own.division.rows();
        let len = buffer.len_bytes();
        let request = self.request_of_leaves(caller, dtype, len, own, tag);
        if rows == 1 {
            let op = own.weights.is_empty().then_some(ReduceOp::Sum);
            return self.call(request, |engine, call| {
                self.check_leaves(dtype, len, own)?;
                engine.all_reduce_shared(call, dtype, buffer, op)
            });
        }
        let row = len / rows;
        let (row_bytes, world_size) = (dtype.size_bytes(), self.size());
        let elements = RowDivision { rows: row / row_bytes, row_bytes, world_size };
        let ranges: Vec<_> = (0..world_size).map(|rank| elements.bytes_of(rank)).collect();
        let mut result = SharedBuffer::plain(row);
        let mut mine = vec![0; ranges[self.rank].len()];
        self.call(request, |engine, call| {
            self.check_leaves(dtype, len, own)?;
            reduce_leaf_rows(engine, call, (dtype, own), buffer.bytes_mut(), &ranges, &mut mine)
        })?;
        let gather = Request::elements(Collective::AllGather, dtype, row, caller);
        let request = Request { tag, digest: request.digest, ..gather };
        self.call(request, |engine, call| {
            let mut rest = result.bytes_mut();
            let mut outputs = Vec::with_capacity(ranges.len());
            for range in &ranges {
                let (output, behind) = std::mem::take(&mut rest).split_at_mut(range.len());
                outputs.push(output);
                rest = behind;
            }
            engine.all_gather(call, &mine, &mut outputs)
        })?;
        Ok(result.view())
    }

    /// The call in which this rank passes sums of leaves in `len` bytes.
    pub(super) fn request_of_leaves(
        &self,
        caller: Caller,
        dtype: DType,
        len: usize,
        own: OwnLeaves<'_>,
        tag: u64,
    ) -> Request {
        let OwnLeaves { division, weights } = own;
        let words = [division.count(), division.ranks(), usize::from(weights.is_empty())];
        let digest = digest(words.map(|word| word as u64));
        let weight = if weights.is_empty() { 1.0 } else { weights.iter().sum() };
        Request { weight, tag, digest, ..Request::elements(Collective::AllReduceLeaves, dtype, len, caller) }
    }

    /// Fails unless `own` fits the group and a buffer of `len` bytes.
    pub(super) fn check_leaves(&self, dtype: DType, len: usize, own: OwnLeaves<'_>) -> Result<()> {
        let OwnLeaves { division, weights } = own;
        let rows = division.rows();
        check_whole(dtype, len)?;
        check_op(ReduceOp::Mean, dtype)?;
        if division.ranks() != self.size() {
            return refuse(format!("leaves for {} ranks, but the group has {}", division.ranks(), self.size()));
        }
        if !weights.is_empty() && weights.len() != rows {
            return refuse(format!("{} weights for {rows} rows", weights.len()));
        }
        check_rows("a buffer", dtype, len, rows, len / rows)
    }

    /// Without an `op`, the reduction is the weighted mean, in which this rank has the weight `weight`.
    pub(crate) fn all_reduce_on_device(
        &self,
        caller: Caller,
        elements: OnDevice<'_>,
        op: Option<ReduceOp>,
        weight: f64,
        tag: u64,
    ) -> Result<()> {
        let OnDevice { dtype, len_elems, .. } = elements;
        let collective = if op.is_some() { Collective::AllReduce } else { Collective::AllReduceWeighted };
        let request = Request { len_elems, digest: digest([ON_DEVICE]), ..Request::bare(collective, caller) };
        let request = Request { reduce: op, dtype: Some(dtype), weight, tag, ..request };
        self.call(request, |engine, call| {
            check_op(op.unwrap_or(ReduceOp::Mean), dtype)?;
            engine.all_reduce_on_device(call, elements, op)
        })
    }

    pub(crate) fn reduce(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        buf: &mut [u8],
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request = Request::elements(Collective::Reduce, elements, buf.len(), caller);
        self.call(Request { reduce: Some(op), root: Some(root), ..request }, |engine, call| {
            check_whole(dtype, buf.len())?;
            check_op(op, dtype)?;
            self.check_root(root)?;
            engine.reduce(call, dtype, buf, op, root)
        })
    }

    pub(crate) fn reduce_scatter(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        input: &[u8],
        output: &mut [u8],
        (op, tag): (ReduceOp, u64),
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request = Request::elements(Collective::ReduceScatter, elements, output.len(), caller);
        let request = Request { reduce: Some(op), tag, ..request };
        self.call(request, |engine, call| {
            check_whole(dtype, output.len())?;
            check_op(op, dtype)?;
            check_rows("an input", dtype, input.len(), self.size(), output.len())?;
            engine.reduce_scatter(call, dtype, input, output, op)
        })
    }

    pub(crate) fn broadcast(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        buf: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request =
            Request { root: Some(root), ..Request::elements(Collective::Broadcast, elements, buf.len(), caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, buf.len())?;
            self.check_root(root)?;
            engine.broadcast(call, buf, root)
        })
    }

    pub(crate) fn all_gather(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        input: &[u8],
        rows: &mut [u8],
        tag: u64,
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request = Request { tag, ..Request::elements(Collective::AllGather, elements, input.len(), caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, input.len())?;
            check_rows("an output", dtype, rows.len(), self.size(), input.len())?;
            engine.all_gather(call, input, &mut self.rows_mut(rows, input.len()))
        })
    }

    /// Only the root passes `rows`.
    pub(crate) fn gather(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        input: &[u8],
        rows: Option<&mut [u8]>,
        root: usize,
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request =
            Request { root: Some(root), ..Request::elements(Collective::Gather, elements, input.len(), caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, input.len())?;
            self.check_root(root)?;
            let mut rows = rows.map(|rows| self.rows_mut(rows, input.len()));
            engine.gather(call, input, rows.as_deref_mut(), root)
        })
    }

    /// [`gather`](Self::gather), with room made for it on the root.
    pub(crate) fn gather_elements<T: Element>(
        &self,
        caller: Caller,
        input: &[T],
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        let bytes = T::bytes(input);
        if self.rank != root {
            return self.gather(caller, T::DTYPE, bytes, None, root).map(|()| None);
        }
        let mut rows = T::zeros(input.len() * self.size());
        T::edit(&mut rows, |rows| self.gather(caller, T::DTYPE, bytes, Some(rows), root))?;
        Ok(Some(rows))
    }

    pub(crate) fn scatter(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        input: Option<&[u8]>,
        output: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request =
            Request { root: Some(root), ..Request::elements(Collective::Scatter, elements, output.len(), caller) };
        self.call(request, |engine, call| {
            check_whole(dtype, output.len())?;
            self.check_root(root)?;
            if self.rank != root {
                return engine.scatter(call, None, output, root);
            }
            // Only the root sees its input: the other ranks would wait for it, so a fault must end the world.
            let fault = |why: String| self.member.seat.membership.own_error(format!("scatter, as its root: {why}"));
            let Some(input) = input else {
                return Err(fault("it passed None, but must pass the rows of all ranks".to_string()));
            };
            check_rows("an input", dtype, input.len(), self.size(), output.len()).map_err(|e| fault(e.to_string()))?;
            let rows: Vec<&[u8]> = (0..self.size()).map(|nth| &input[nth * output.len()..][..output.len()]).collect();
            engine.scatter(call, Some(&rows), output, root)
        })
    }

    pub(crate) fn all_to_all(
        &self,
        caller: Caller,
        elements: impl Into<TensorType>,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        let elements @ TensorType { dtype, .. } = elements.into();
        let request = Request::elements(Collective::AllToAll, elements, input.len(), caller);
        self.call(request, |engine, call| {
            check_whole(dtype, input.len())?;
            let elements = input.len() / dtype.size_bytes();
            if !elements.is_multiple_of(self.size()) {
                return refuse(format!("an input of {elements} elements is not [world, n] = {} × n", self.size()));
            }
            if input.len() != output.len() {
                let room = output.len() / dtype.size_bytes();
                return refuse(format!("an input of {elements} elements and an output of {room}: both are [world, n]"));
            }
            engine.all_to_all(call, input, output)
        })
    }

    /// `rows` as one row of `len` bytes per rank, also if `len` is 0.
    fn rows_mut<'a>(&self, rows: &'a mut [u8], len: usize) -> Vec<&'a mut [u8]> {
        let mut rest = rows;
        let mut outputs = Vec::with_capacity(self.size());
        for _ in 0..self.size() {
            let (row, behind) = rest.split_at_mut(len);
            outputs.push(row);
            rest = behind;
        }
        outputs
    }
}
