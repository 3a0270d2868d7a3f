//! Collectives on the elements of tensors, after they were read from the device into host memory.

use burn::tensor::kind::Basic;
use burn::tensor::{Tensor, TensorData};
use burn_ddp_comm::{ProcessGroup, ReduceOp, TensorType};

use crate::agreement::tell_peers;
use crate::ddp::Ddp;
use crate::model::schema::unreadable;
use crate::tensor_conversion::{data_of, with_type};
use crate::{Error, Result};

/// Reads the elements of a tensor for a collective. A read that fails ends the job, since the other ranks wait in the
/// collective.
pub(crate) fn read<const D: usize, K: Basic>(ddp: &Ddp, tensor: Tensor<D, K>) -> Result<(TensorType, TensorData)> {
    if D == 0 {
        return Err(Error::invalid("collectives take tensors of one dimension or more"));
    }
    let data = data_of(tensor).map_err(|e| unreadable("the tensor", &e));
    with_type(data.inspect_err(|e| tell_peers(ddp, e))?)
}

#[track_caller]
pub(crate) fn all_reduce(group: &ProcessGroup, elements: (TensorType, TensorData), op: ReduceOp) -> Result<TensorData> {
    let (of, mut data) = elements;
    in_place(&mut data, |bytes| group.all_reduce_bytes(of, bytes, op, 0))?;
    Ok(data)
}

#[track_caller]
pub(crate) fn all_gather(group: &ProcessGroup, elements: (TensorType, TensorData)) -> Result<TensorData> {
    let (of, data) = elements;
    let mut shape = data.shape().clone();
    let bytes = group.all_gather_bytes(of, data.as_bytes())?;
    shape[0] *= group.world_size();
    Ok(TensorData::from_bytes_vec(bytes, shape, data.dtype()))
}

#[track_caller]
pub(crate) fn reduce_scatter(
    group: &ProcessGroup,
    elements: (TensorType, TensorData),
    op: ReduceOp,
) -> Result<TensorData> {
    let (of, data) = elements;
    let mut shape = data.shape().clone();
    let out = divided("reduce_scatter", &data, group, |bytes| {
        let mut out = vec![0u8; bytes.len() / group.world_size()];
        group.reduce_scatter_bytes(of, bytes, &mut out, op)?;
        Ok(out)
    })?;
    shape[0] /= group.world_size();
    Ok(TensorData::from_bytes_vec(out, shape, data.dtype()))
}

#[track_caller]
pub(crate) fn all_to_all(group: &ProcessGroup, elements: (TensorType, TensorData)) -> Result<TensorData> {
    let (of, data) = elements;
    let out = divided("all_to_all", &data, group, |bytes| {
        let mut out = vec![0u8; bytes.len()];
        group.all_to_all_bytes(of, bytes, &mut out)?;
        Ok(out)
    })?;
    Ok(TensorData::from_bytes_vec(out, data.shape().clone(), data.dtype()))
}

/// Result of `call` on the bytes of a tensor whose rows are divided between the ranks.
///
/// # Errors
///
/// [`Error::Invalid`] if the rows do not divide by the ranks. The call is made nevertheless, on no bytes: ranks that
/// pass another shape would wait for this one.
fn divided(
    what: &str,
    data: &TensorData,
    group: &ProcessGroup,
    call: impl FnOnce(&[u8]) -> burn_ddp_comm::Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let (rows, ranks) = (data.shape()[0], group.world_size());
    if rows.is_multiple_of(ranks) {
        return Ok(call(data.as_bytes())?);
    }
    call(&[])?;
    Err(Error::invalid(format!("{what} splits dimension 0 over the ranks: {rows} rows do not divide by {ranks} ranks")))
}

pub(crate) fn in_place(data: &mut TensorData, f: impl FnOnce(&mut [u8]) -> burn_ddp_comm::Result<()>) -> Result<()> {
    TensorData::with_bytes_mut([data], |mut bytes| f(bytes[0]))?;
    Ok(())
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Tensor;
    use burn::tensor::kind::Basic;

    use crate::{Collectives, Ddp, ReduceOp, Result};

    /// The collectives that take tensors of one shape from all ranks.
    const COLLECTIVES: [&str; 12] = [
        "all_reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "reduce",
        "gather",
        "scatter",
        "all_to_all",
        "send",
        "differentiable all_reduce",
        "differentiable all_gather",
        "differentiable reduce_scatter",
    ];

    /// Calls a collective that takes tensors of every kind; `None` if there is none of this name.
    fn call<const D: usize, K: Basic>(ddp: &Ddp, name: &str, x: Tensor<D, K>) -> Option<Result<()>> {
        let sum = ReduceOp::Sum;
        Some(match name {
            "all_reduce" => ddp.all_reduce(x, sum).map(drop),
            "broadcast" => ddp.broadcast(x, 1).map(drop),
            "all_gather" => ddp.all_gather(x).map(drop),
            "reduce_scatter" => ddp.reduce_scatter(x, sum).map(drop),
            "reduce" => ddp.reduce(x, sum, 0).map(drop),
            "gather" => ddp.gather(x, 1).map(drop),
            "scatter" => ddp.scatter(Some(Tensor::cat(vec![x.clone(), x.clone()], 0)), x, 0).map(drop),
            "all_to_all" => ddp.all_to_all(x).map(drop),
            "send" if ddp.rank() == 0 => ddp.send(x, 1),
            "send" => ddp.recv(x, 0).map(drop),
            _ => return None,
        })
    }

    fn call_on_floats<const D: usize>(ddp: &Ddp, name: &str, x: Tensor<D>) -> Result<()> {
        let (d, sum) = (ddp.differentiable(), ReduceOp::Sum);
        match name {
            "differentiable all_reduce" => d.all_reduce(x, sum).map(drop),
            "differentiable all_gather" => d.all_gather(x).map(drop),
            "differentiable reduce_scatter" => d.reduce_scatter(x, sum).map(drop),
            _ => call(ddp, name, x).expect("a collective"),
        }
    }

    /// The errors of two ranks that call a collective in different ways; of the world for a rank whose call succeeded.
    fn errors(part: impl Fn(&Ddp) -> Result<()> + Sync) -> Vec<String> {
        let ranks = Ddp::spawn(2, |ddp| match part(&ddp).and_then(|()| ddp.barrier()) {
            Ok(()) => Ok(String::new()),
            Err(error) => Ok(error.to_string()),
        });
        ranks.unwrap()
    }

    #[test]
    fn tensors_of_other_shapes_and_equally_many_elements_are_an_error_of_every_rank() {
        for name in COLLECTIVES {
            type Other = fn(&Ddp, &str, Tensor<2>) -> Result<()>;
            let others: [(&str, Other); 3] = [
                ("[3, 4]", |ddp, name, x| call_on_floats(ddp, name, x.transpose())),
                ("[12]", |ddp, name, x| call_on_floats(ddp, name, x.flatten::<1>(0, 1))),
                ("[4, 1, 3]", |ddp, name, x| call_on_floats(ddp, name, x.unsqueeze_dim::<3>(1))),
            ];
            for (shape, other) in others {
                for odd in [0, 1] {
                    let errors = errors(|ddp| {
                        let x = Tensor::<2>::ones([4, 3], &ddp.device()?);
                        if ddp.rank() == odd { other(ddp, name, x) } else { call_on_floats(ddp, name, x) }
                    });
                    for error in errors {
                        let names = [shape, "[4, 3]", "shapes", "rank 0 called", "rank 1 called"];
                        assert!(names.iter().all(|name| error.contains(name)), "{name}, {shape}, {odd}: {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn tensors_of_other_dtypes_are_an_error_of_every_rank() {
        for name in COLLECTIVES {
            let errors = errors(|ddp| {
                let x = Tensor::<2>::ones([4, 3], &ddp.device()?);
                match ddp.rank() {
                    0 => call_on_floats(ddp, name, x),
                    _ => call(ddp, name, x.clone().int())
                        .unwrap_or_else(|| call_on_floats(ddp, name, x.cast(burn::tensor::DType::F64))),
                }
            });
            for error in errors {
                let names = ["dtypes", "f32", "rank 0 called", "rank 1 called"];
                assert!(names.iter().all(|name| error.contains(name)), "{name}: {error}");
            }
        }
    }

    #[test]
    fn a_scatter_of_a_tensor_of_another_shape_or_dtype_is_an_error_of_every_rank() {
        let wholes: [fn(Tensor<2>) -> Tensor<2>; 2] = [|x| x.transpose(), |x| x.cast(burn::tensor::DType::F64)];
        for whole in wholes {
            let errors = errors(|ddp| {
                let device = ddp.device()?;
                let whole = ddp.is_main().then(|| whole(Tensor::ones([4, 3], &device)));
                ddp.scatter(whole, Tensor::ones([2, 3], &device), 0).map(drop)
            });
            assert!(errors.iter().all(|e| e.contains("scatter of") && e.contains("[2, 3]")), "{errors:?}");
        }
    }

    #[test]
    fn rows_that_all_ranks_refuse_leave_the_group_usable() {
        Ddp::spawn(2, |ddp| {
            for name in ["reduce_scatter", "all_to_all"] {
                let error = call(&ddp, name, Tensor::<2>::ones([3, 2], &ddp.device()?)).expect("a collective");
                let error = error.unwrap_err().to_string();
                assert!(error.contains("3 rows do not divide by 2 ranks"), "{error}");
            }
            Ok(ddp.barrier()?)
        })
        .unwrap();
    }
}
