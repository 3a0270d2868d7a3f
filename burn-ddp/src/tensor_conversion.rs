//! Conversion between Burn's tensors and the arguments of collectives: element types, and elements in host memory.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::kind::Basic;
use burn::tensor::{BoolStore, DType as BurnDType, Device, Tensor, TensorData};
use burn_ddp_comm::{DType, TensorType};

use crate::{Error, Result};

/// The collectives' name for a Burn dtype; `None` for dtypes that no collective carries (i16, unsigned beyond u8,
/// quantized, packed bools).
pub(crate) fn comm_dtype(dtype: BurnDType) -> Option<DType> {
    Some(match dtype {
        BurnDType::F64 => DType::F64,
        BurnDType::F32 | BurnDType::Flex32 => DType::F32,
        BurnDType::F16 => DType::F16,
        BurnDType::BF16 => DType::BF16,
        BurnDType::I64 => DType::I64,
        BurnDType::I32 => DType::I32,
        BurnDType::I8 => DType::I8,
        BurnDType::U8 => DType::U8,
        BurnDType::Bool(BoolStore::Native) => DType::Bool,
        _ => return None,
    })
}

/// `x` in this type.
pub(crate) fn cast<B: Backend>(x: FloatTensor<B>, dtype: BurnDType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, dtype.into()) }
}

/// Burn's name for a dtype of the collectives.
pub(crate) fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F64 => BurnDType::F64,
        DType::F32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::I64 => BurnDType::I64,
        DType::I32 => BurnDType::I32,
        DType::I8 => BurnDType::I8,
        DType::U8 => BurnDType::U8,
        DType::Bool => BurnDType::Bool(BoolStore::Native),
    }
}

#[cfg(test)]
thread_local! {
    /// True while this thread cannot read tensors from their devices.
    pub(crate) static UNREADABLE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Reads the elements of a tensor from its device. On Flex, a tensor without other holders is moved and not copied.
///
/// # Errors
///
/// The device's reason.
pub(crate) fn data_of<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Result<TensorData, String> {
    #[cfg(test)]
    if UNREADABLE.get() {
        return Err("the device is lost".into());
    }
    tensor.try_into_data().map_err(|e| format!("{e:?}"))
}

/// Elements, their type and shape, in the form that collectives take.
pub(crate) fn with_type(data: TensorData) -> Result<(TensorType, TensorData)> {
    // Between ranks a bool is a byte, whatever the backend stores it as.
    let data = match data.dtype() {
        dtype if dtype.is_bool() => {
            data.try_cast_as::<bool>().map_err(|e| Error::invalid(format!("reading bools: {e}")))?
        }
        _ => data,
    };
    let dtype = comm_dtype(data.dtype())
        .ok_or_else(|| Error::invalid(format!("tensors of dtype {:?} cannot be sent between ranks", data.dtype())))?;
    Ok((TensorType::new(dtype, data.shape()), data))
}

/// A tensor of these elements on `device`.
pub(crate) fn back<const D: usize, K: Basic>(data: TensorData, device: &Device) -> Tensor<D, K> {
    match data.dtype() {
        dtype if dtype.is_bool() => Tensor::from_data(data, device),
        dtype => Tensor::from_data(data, (device, dtype)),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use burn::module::Module;
    use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
    use burn::optim::{GradientsParams, SgdConfig};
    use burn::tensor::{Device, Tensor};
    use burn_ddp_comm::WorldOptions;

    use super::UNREADABLE;
    use crate::{
        Collectives, Ddp, DistributedOptimizer, ReduceOp, Result, Sharding, WrapConfig, grad_norm, param_hash,
    };

    #[derive(Module, Debug)]
    struct Net {
        linear: Linear,
        norm: BatchNorm,
    }

    /// Arguments of a rank's call.
    struct Given<'a> {
        ddp: &'a Ddp,
        /// A file or directory to be.
        path: &'a Path,
        net: &'a Net,
        grads: GradientsParams,
        not_wrapped: Net,
    }

    /// A call that takes all ranks.
    type Call = fn(Given<'_>) -> Result<()>;

    const CALLS: [(&str, Call); 13] = [
        ("save", |g| g.ddp.save(&g.net.linear, g.path).map(drop)),
        ("save_safetensors", |g| g.ddp.save_safetensors(&g.net.linear, g.path).map(drop)),
        ("checkpoint", |g| g.ddp.checkpoints(g.path)?.save(1, |c| c.model(&g.net.linear))),
        ("param_hash", |g| param_hash(g.net).map(drop)),
        ("check_replicas", |g| g.ddp.check_replicas(&g.net.linear)),
        ("sync_buffers", |g| g.ddp.sync_buffers(g.net)),
        ("grad_norm", |g| grad_norm(&g.grads, g.net).map(drop)),
        ("unwrap", |g| g.ddp.unwrap(g.net.clone()).map(drop)),
        ("wrap", |g| g.ddp.wrap(g.not_wrapped).map(drop)),
        ("broadcast_parameters", |g| g.ddp.broadcast_parameters(g.not_wrapped, 1).map(drop)),
        ("all_reduce", |g| g.ddp.all_reduce(g.net.linear.weight.base(), ReduceOp::Sum).map(drop)),
        ("differentiable", |g| g.ddp.differentiable().all_gather(g.net.linear.weight.base()).map(drop)),
        ("DistributedOptimizer", |g| {
            let device = g.not_wrapped.linear.weight.base().device();
            let loss = g.not_wrapped.linear.forward(Tensor::<2>::ones([4, 4], &device)).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &g.not_wrapped);
            DistributedOptimizer::new(g.ddp, SgdConfig::new().init()).try_step(0.1, g.not_wrapped, grads).map(drop)
        }),
    ];

    fn net(device: &Device) -> Net {
        Net { linear: LinearConfig::new(4, 4).init(device), norm: BatchNormConfig::new(4).init(device) }
    }

    /// Errors of the ranks in a call in which one cannot read its device; `None` for a rank that had none.
    fn errors(sharding: Sharding, failing: usize, call: Call) -> Vec<Option<String>> {
        let options = WorldOptions { timeout: Duration::from_secs(60), ..Default::default() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let ranks = Ddp::spawn_with(2, options, |ddp| {
            let device = ddp.device()?.autodiff();
            let config = WrapConfig::new().with_sharding(sharding).with_sharding_above(1);
            let net = ddp.wrap_with(self::net(&device), &config)?;
            ddp.optimizer(SgdConfig::new().init(), &net)?;
            let x = Tensor::<2>::ones([2, 4], &device) * ddp.rank() as f32;
            let loss = net.norm.forward(net.linear.forward(x)).powf_scalar(2.0).sum();
            let grads = ddp.backward(&loss, &net)?.expect("averages");
            let given = Given { ddp: &ddp, path: &path, net: &net, grads, not_wrapped: self::net(&device) };
            UNREADABLE.set(ddp.rank() == failing);
            let begin = Instant::now();
            let error = call(given).err().map(|e| e.to_string());
            UNREADABLE.set(false);
            // A rank that the error has not reached yet hears of it in its next call.
            let next = ddp.barrier().err().map(|e| e.to_string());
            let error = error.or(next);
            assert!(begin.elapsed() < Duration::from_secs(30), "waited {:?}", begin.elapsed());
            Ok(error)
        });
        ranks.unwrap()
    }

    #[test]
    fn a_device_that_one_rank_cannot_read_is_an_error_of_every_rank_that_names_it() {
        for (name, call) in CALLS {
            for sharding in [Sharding::Off, Sharding::Parameters] {
                for failing in [0, 1] {
                    let errors = errors(sharding, failing, call);
                    let collective = match name {
                        // On one rank alone without parts.
                        "param_hash" | "grad_norm" | "unwrap" => sharding == Sharding::Parameters,
                        // Rank 0 alone reads what is whole.
                        "checkpoint" => sharding == Sharding::Parameters || failing == 0,
                        _ => true,
                    };
                    for (rank, error) in errors.iter().enumerate() {
                        let what = format!("{name}, {sharding:?}, rank {rank} while {failing} fails: {error:?}");
                        match error {
                            None => {
                                let reads_nothing = rank != failing || matches!(name, "unwrap" | "checkpoint");
                                assert!(!collective && reads_nothing, "{what}");
                            }
                            Some(error) => {
                                let names = rank == failing || error.contains(&format!("rank {failing}"));
                                assert!(names && error.contains("the device is lost"), "{what}");
                            }
                        }
                    }
                }
            }
        }
    }
}
