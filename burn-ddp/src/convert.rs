//! Conversion between Burn's tensors and what collectives carry: element types and elements in host memory.

use burn::tensor::kind::Basic;
use burn::tensor::{BoolStore, DType as BurnDType, Device, Tensor, TensorData};
use burn_ddp_comm::DType;

use crate::{Error, Result};

/// Our name for a Burn dtype; `None` for what no collective carries (quantized, unsigned beyond u8, packed bools).
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

/// Burn's name for one of our dtypes.
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

/// Elements of a tensor, from its device. On Flex a tensor that has one holder gives its memory away: no copy.
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

/// Elements and their type, as collectives take them.
pub(crate) fn with_dtype(data: TensorData) -> Result<(DType, TensorData)> {
    // Between ranks a bool is a byte, whatever the backend stores it as.
    let data = match data.dtype() {
        dtype if dtype.is_bool() => {
            data.try_cast_as::<bool>().map_err(|e| Error::invalid(format!("reading bools: {e}")))?
        }
        _ => data,
    };
    let dtype = comm_dtype(data.dtype())
        .ok_or_else(|| Error::invalid(format!("tensors of dtype {:?} cannot be sent between ranks", data.dtype())))?;
    Ok((dtype, data))
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

    /// A call that takes all ranks, on a wrapped model, its gradients, and an unwrapped model.
    type Call = fn(&Ddp, &Net, GradientsParams, Net) -> Result<()>;

    const CALLS: [(&str, Call); 13] = [
        ("save", |ddp, net, _, _| ddp.save(net, file(ddp)).map(drop)),
        ("save_safetensors", |ddp, net, _, _| ddp.save_safetensors(net, file(ddp)).map(drop)),
        ("param_hash", |_, net, _, _| param_hash(net).map(drop)),
        ("check_replicas", |ddp, net, _, _| ddp.check_replicas(net)),
        ("sync_buffers", |ddp, net, _, _| ddp.sync_buffers(net)),
        ("grad_norm", |_, net, grads, _| grad_norm(&grads, net).map(drop)),
        ("unwrap", |ddp, net, _, _| ddp.unwrap(net.clone()).map(drop)),
        ("wrap", |ddp, _, _, plain| ddp.wrap(plain).map(drop)),
        ("broadcast_parameters", |ddp, _, _, plain| ddp.broadcast_parameters(plain, 1).map(drop)),
        ("all_reduce", |ddp, net, _, _| ddp.all_reduce(net.linear.weight.base(), ReduceOp::Sum).map(drop)),
        ("differentiable", |ddp, net, _, _| ddp.differentiable().all_gather(net.linear.weight.base()).map(drop)),
        ("DistributedOptimizer", |ddp, _, _, plain| {
            let device = plain.linear.weight.base().device();
            let loss = plain.linear.forward(Tensor::<2>::ones([4, 4], &device)).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &plain);
            DistributedOptimizer::new(ddp, SgdConfig::new().init()).try_step(0.1, plain, grads).map(drop)
        }),
        ("checkpoint", |ddp, net, _, _| ddp.checkpoints(file(ddp))?.save(1, |c| c.model(net))),
    ];

    fn file(ddp: &Ddp) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("unreadable-{}-{:?}", std::process::id(), ddp.group().id()))
    }

    fn net(device: &Device) -> Net {
        Net { linear: LinearConfig::new(4, 4).init(device), norm: BatchNormConfig::new(4).init(device) }
    }

    /// Errors of the ranks in a call in which one cannot read its device; `None` for a rank that had none.
    fn errors(sharding: Sharding, failing: usize, call: Call) -> Vec<Option<String>> {
        let options = WorldOptions { timeout: Duration::from_secs(60), ..Default::default() };
        let ranks = Ddp::spawn_with(2, options, |ddp| {
            let device = ddp.device()?.autodiff();
            let config = WrapConfig::new().with_sharding(sharding).with_sharding_above(1);
            let net = ddp.wrap_with(self::net(&device), &config)?;
            ddp.optimizer(SgdConfig::new().init(), &net)?;
            let x = Tensor::<2>::ones([2, 4], &device) * ddp.rank() as f32;
            let loss = net.norm.forward(net.linear.forward(x)).powf_scalar(2.0).sum();
            let grads = GradientsParams::from_grads(ddp.backward(&loss, &net)?, &net);
            let plain = self::net(&device);
            UNREADABLE.set(ddp.rank() == failing);
            let begin = Instant::now();
            let error = call(&ddp, &net, grads, plain).err().map(|e| e.to_string());
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
                        // Rank 0 reads.
                        _ => true,
                    };
                    for (rank, error) in errors.iter().enumerate() {
                        let what = format!("{name}, {sharding:?}, rank {rank} while {failing} fails: {error:?}");
                        match error {
                            None => assert!(!collective && (rank != failing || name == "unwrap"), "{what}"),
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
