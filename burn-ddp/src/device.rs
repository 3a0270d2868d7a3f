//! Choice of the device on which a rank computes.

use burn::backend::DispatchDevice;
use burn::tensor::Device;
#[cfg(any(feature = "cube", feature = "tch"))]
use burn::tensor::DeviceType;

use crate::{Error, Result};

/// Variable that chooses a kind of device, as for Burn's default device.
const KIND: &str = "BURN_DEVICE";
/// Variable that lets the ranks of a machine share its GPUs.
const SHARE: &str = "BURN_DDP_SHARE_DEVICES";
/// Variables of launchers that give each rank a GPU of its own.
const VISIBLE: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"];

/// A kind of device whose backend is built in.
struct Kind {
    /// Its name in [`KIND`].
    name: &'static str,
    /// Finds the devices of this kind.
    devices: fn() -> Devices,
}

enum Devices {
    #[cfg_attr(not(any(feature = "cube", feature = "tch")), allow(dead_code))]
    /// GPUs, one per rank. Listing them opens none of them.
    Each(Vec<Device>),
    /// The processor, on which all ranks compute.
    Shared(Device),
}

/// All kinds that are built in, in the order of Burn's default device.
fn kinds() -> Vec<Kind> {
    vec![
        #[cfg(feature = "cuda")]
        Kind { name: "cuda", devices: || gpus(DeviceType::Cuda) },
        #[cfg(feature = "metal")]
        Kind { name: "metal", devices: || gpus(DeviceType::Metal) },
        #[cfg(feature = "rocm")]
        Kind { name: "rocm", devices: || gpus(DeviceType::Rocm) },
        #[cfg(feature = "vulkan")]
        Kind { name: "vulkan", devices: || gpus(DeviceType::Vulkan) },
        #[cfg(feature = "webgpu")]
        Kind { name: "webgpu", devices: || gpus(DeviceType::WebGpu) },
        #[cfg(feature = "wgpu")]
        Kind { name: "wgpu", devices: || gpus(DeviceType::Wgpu) },
        #[cfg(feature = "cpu")]
        Kind { name: "cpu", devices: || Devices::Shared(Device::cpu()) },
        #[cfg(feature = "tch")]
        Kind {
            name: "tch",
            devices: || match Device::enumerate(DeviceType::LibTorch).into_vec() {
                gpus if gpus.is_empty() => Devices::Shared(libtorch()),
                gpus => Devices::Each(gpus),
            },
        },
        #[cfg(feature = "flex")]
        Kind { name: "flex", devices: || Devices::Shared(Device::flex()) },
        #[cfg(feature = "ndarray")]
        Kind { name: "ndarray", devices: || Devices::Shared(ndarray()) },
    ]
}

#[cfg(feature = "tch")]
fn libtorch() -> Device {
    Device::libtorch()
}

#[cfg(feature = "ndarray")]
fn ndarray() -> Device {
    Device::ndarray()
}

/// The GPUs of a kind; if there are none, the processor, provided that the kind's driver emulates a GPU on it.
#[cfg(feature = "cube")]
#[allow(dead_code)] // `cube` alone is no backend
fn gpus(kind: DeviceType) -> Devices {
    let (emulated, gpus): (Vec<_>, Vec<_>) = Device::enumerate(kind).into_vec().into_iter().partition(is_emulated);
    match emulated.into_iter().next() {
        Some(emulated) if gpus.is_empty() => Devices::Shared(emulated),
        _ => Devices::Each(gpus),
    }
}

/// True if the device is a GPU that its driver emulates on the processor.
fn is_emulated(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal", feature = "webgpu"))]
        DispatchDevice::Cube(burn_cubecl::CubeDevice::Wgpu(device)) => {
            device.kind == burn_cubecl::cubecl::device::WgpuDeviceKind::Cpu
        }
        _ => false,
    }
}

/// Device of the rank `local_rank` of its machine.
pub(crate) fn of_rank(local_rank: usize, local_world_size: usize) -> Result<Device> {
    let rank = LocalRank { local_rank, local_world_size };
    rank.choose(kinds(), &|name| std::env::var(name).ok())
}

/// Number of a rank among the ranks of its machine.
#[derive(Clone, Copy)]
struct LocalRank {
    local_rank: usize,
    local_world_size: usize,
}

impl LocalRank {
    fn choose(self, kinds: Vec<Kind>, env: &dyn Fn(&str) -> Option<String>) -> Result<Device> {
        let Some(wanted) = env(KIND).map(|name| name.trim().to_lowercase()) else {
            let built_in: Vec<_> = kinds.iter().map(|kind| (kind.name, (kind.devices)())).collect();
            let gpu =
                built_in.iter().position(|(_, devices)| matches!(devices, Devices::Each(gpus) if !gpus.is_empty()));
            let processor = || {
                built_in
                    .iter()
                    .position(|(_, devices)| matches!(devices, Devices::Shared(device) if !is_emulated(device)))
            };
            let any = gpu.or_else(processor).unwrap_or(0);
            return match built_in.into_iter().nth(any) {
                Some((name, devices)) => self.one_of(name, devices, env),
                None => Err(Error::invalid(
                    "burn-ddp was built without a backend: enable its feature `flex`, or one for GPUs such as `cuda` \
                     or `wgpu`",
                )),
            };
        };
        match kinds.iter().find(|kind| kind.name == wanted) {
            Some(kind) => self.one_of(kind.name, (kind.devices)(), env),
            None => {
                let names: Vec<_> = kinds.iter().map(|kind| kind.name).collect();
                Err(Error::invalid(format!(
                    "{KIND}={wanted}, but that is not built in; built in are: {}. If burn-ddp has a feature \
                     {wanted:?}, enable it",
                    names.join(", ")
                )))
            }
        }
    }

    fn one_of(self, kind: &str, devices: Devices, env: &dyn Fn(&str) -> Option<String>) -> Result<Device> {
        let LocalRank { local_rank, local_world_size } = self;
        let gpus = match devices {
            Devices::Shared(device) => return Ok(device),
            Devices::Each(gpus) => gpus,
        };
        // Under a launcher that shows each rank only its own GPU, that GPU is number 0 on every rank.
        let given = || gpus.len() == 1 && VISIBLE.iter().any(|name| env(name).is_some_and(|ids| !ids.contains(',')));
        let shared = || env(SHARE).is_some_and(|text| text.trim() == "1");
        let index = match gpus.len() {
            0 => {
                return Err(Error::invalid(format!(
                    "there is no {kind} device on this machine: {KIND} chooses another kind"
                )));
            }
            count if local_rank < count => local_rank,
            _ if given() => 0,
            count if shared() => local_rank % count,
            count => {
                return Err(Error::invalid(format!(
                    "local rank {local_rank} of {local_world_size} has no {kind} device: this machine has {count}. \
                     Start at most {count} ranks on it, or set {SHARE}=1 to share them on purpose, or choose \
                     yourself, such as `Device::cuda(ddp.local_rank() / 2)`"
                )));
            }
        };
        Ok(gpus[index].clone())
    }
}

/// Kind of a device, by its name in `BURN_DEVICE` if it has one.
pub(crate) fn kind(device: &Device) -> String {
    supported(device).unwrap_or_else(|other| other)
}

/// Checks that gradients can be intercepted on this device.
pub(crate) fn check_supported(device: &Device) -> Result<()> {
    supported(device).map(drop).map_err(|other| {
        Error::invalid(format!(
            "burn-ddp has no support for {other} built in: enable the feature of burn-ddp that is named like its \
             backend, as for Burn itself (flex, ndarray, tch, wgpu, vulkan, metal, webgpu, cuda, rocm, cpu)"
        ))
    })
}

/// Kind of a device on which gradients can be intercepted; for any other device, Burn's name of it as the error.
fn supported(device: &Device) -> Result<String, String> {
    let plain = device.clone().without_autodiff();
    match plain.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => Ok("flex".into()),
        #[cfg(feature = "ndarray")]
        DispatchDevice::NdArray(_) => Ok("ndarray".into()),
        #[cfg(feature = "tch")]
        DispatchDevice::LibTorch(device) => Ok(format!("tch {device:?}").to_lowercase()),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => Ok(format!("{:?}", device.runtime()).to_lowercase()),
        #[allow(unreachable_patterns)] // if burn-ddp has the features of all backends that Burn was built with
        other => Err(format!("{other:?}")),
    }
}

/// The number of a CUDA device among the CUDA devices that this process sees; `None` for devices of other kinds.
#[cfg(feature = "nccl")]
pub(crate) fn cuda_ordinal(device: &Device) -> Option<usize> {
    let plain = device.clone().without_autodiff();
    match plain.as_dispatch() {
        DispatchDevice::Cube(burn_cubecl::CubeDevice::Cuda(device)) => Some(device.index),
        _ => None,
    }
}

/// True if the device computes while the host goes on.
pub(crate) fn is_asynchronous(device: &Device) -> bool {
    let plain = device.clone().without_autodiff();
    match plain.as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => !is_emulated(&plain),
        _ => false,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// Stands for `count` GPUs.
    fn gpus(count: usize) -> Devices {
        Devices::Each((0..count).map(|_| Device::flex()).collect())
    }

    fn one_of(local_rank: usize, count: usize, set: &[(&str, &str)]) -> Result<Device> {
        let env = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        LocalRank { local_rank, local_world_size: 4 }.one_of("cuda", gpus(count), &env)
    }

    #[test]
    fn ranks_never_share_a_gpu_unasked() {
        assert!(one_of(1, 2, &[]).is_ok());
        let error = one_of(2, 2, &[]).unwrap_err().to_string();
        for part in ["local rank 2 of 4", "this machine has 2", "BURN_DDP_SHARE_DEVICES=1", "Device::cuda"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(one_of(2, 2, &[(SHARE, "1")]).is_ok());
        assert!(one_of(2, 2, &[(SHARE, "0")]).is_err());
        // Slurm's --gpus-per-task, for one.
        assert!(one_of(2, 1, &[("CUDA_VISIBLE_DEVICES", "2")]).is_ok());
        assert!(one_of(2, 2, &[("CUDA_VISIBLE_DEVICES", "0,1")]).is_err());
        assert!(one_of(0, 0, &[]).unwrap_err().to_string().contains("no cuda device"));
    }

    #[test]
    fn the_kind_can_be_chosen() {
        let chosen = |kind: Option<&str>| {
            let kinds = vec![
                Kind { name: "none", devices: || gpus(0) },
                Kind { name: "flex", devices: || Devices::Shared(Device::flex()) },
                Kind { name: "some", devices: || gpus(1) },
            ];
            let env = |name: &str| (name == KIND).then(|| kind.map(String::from)).flatten();
            LocalRank { local_rank: 1, local_world_size: 2 }.choose(kinds, &env)
        };
        assert!(chosen(Some("flex")).is_ok());
        assert!(chosen(Some("Flex ")).is_ok());
        assert!(chosen(None).unwrap_err().to_string().contains("has no some device"), "GPUs come first");
        let error = chosen(Some("cuda")).unwrap_err().to_string();
        assert!(error.contains("BURN_DEVICE=cuda") && error.contains("none, flex, some"), "{error}");
    }

    #[test]
    fn without_a_gpu_the_processor_computes() {
        let kinds = vec![
            Kind { name: "cuda", devices: || gpus(0) },
            Kind { name: "flex", devices: || Devices::Shared(Device::flex()) },
        ];
        assert_eq!(LocalRank { local_rank: 3, local_world_size: 4 }.choose(kinds, &|_| None).unwrap(), Device::flex());
        let error = LocalRank { local_rank: 0, local_world_size: 1 }.choose(Vec::new(), &|_| None).unwrap_err();
        assert!(error.to_string().contains("without a backend"), "{error}");
    }
}
