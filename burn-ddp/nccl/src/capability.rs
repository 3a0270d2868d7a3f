//! Devices and libraries of the ranks, and the decision whether all ranks together can use NCCL.

use std::collections::HashMap;

use burn_ddp_comm::Result;
use serde::{Deserialize, Serialize};

use crate::driver::Driver;
use crate::nccl::{Nccl, version_text};

/// A rank's device and libraries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Number of the device among those that the process sees.
    pub ordinal: usize,
    /// Number of devices that the process sees.
    pub device_count: usize,
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// PCI address of the device, such as `0000:19:00.0`.
    pub pci_bus_id: String,
    /// Unique number of the device, in hexadecimal digits.
    pub uuid: String,
    /// CUDA version of the driver: 12080 for 12.8.
    pub cuda_version: i32,
    /// NCCL version: 22907 for 2.29.7.
    pub nccl_version: i32,
}

/// Finds the device `ordinal` of this process, its driver and its NCCL.
///
/// # Errors
/// [`Error::Environment`](burn_ddp_comm::Error::Environment): no driver, no such device, no NCCL. The message names the
/// package to install or the variable to set.
pub fn capability(ordinal: usize) -> Result<DeviceInfo> {
    DeviceInfo::of(&Driver::load()?, &Nccl::load()?, ordinal)
}

impl DeviceInfo {
    /// Information about the device `ordinal` of a driver.
    ///
    /// # Errors
    /// Those of [`capability`].
    pub fn of(driver: &Driver, nccl: &Nccl, ordinal: usize) -> Result<DeviceInfo> {
        let [name, pci_bus_id, uuid] = driver.describe(ordinal)?;
        let device_count = driver.device_count().map_err(crate::error::environment)?;
        let (cuda_version, nccl_version) = (driver.version(), nccl.version());
        Ok(DeviceInfo { ordinal, device_count, name, pci_bus_id, uuid, cuda_version, nccl_version })
    }
}

/// One rank's information for [`decide`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo {
    /// The rank.
    pub rank: usize,
    /// Its device, or the reason why it has none that can be used.
    pub device: Result<DeviceInfo, String>,
    /// True if its NCCL lets ranks share a GPU: `NCCL_MULTI_RANK_GPU_ENABLE=1`.
    pub may_share: bool,
}

impl RankInfo {
    /// Information about this process as rank `rank` with the device `ordinal`.
    pub fn here(rank: usize, ordinal: usize) -> RankInfo {
        let device = capability(ordinal).map_err(|error| error.to_string());
        let may_share = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
        RankInfo { rank, device, may_share }
    }
}

/// Decision how a world reduces elements in the memory of its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// By NCCL.
    Nccl,
    /// By the host engines, for this reason.
    Host(String),
}

/// Oldest NCCL that lets ranks share a GPU: 2.30.
const SHARING: i32 = 23000;

/// Decides for the world. Each rank passes the information of all ranks, in rank order, so all decide the same.
pub fn decide(ranks: &[RankInfo]) -> Decision {
    let mut devices = Vec::with_capacity(ranks.len());
    for info in ranks {
        match &info.device {
            Ok(device) => devices.push((info, device)),
            Err(why) => return Decision::Host(format!("rank {} cannot use NCCL: {why}", info.rank)),
        }
    }
    let Some((first, first_device)) = devices.first() else {
        return Decision::Host("there are no ranks".to_owned());
    };
    let major = |device: &DeviceInfo| device.nccl_version / 10_000;
    if let Some((other, device)) = devices.iter().find(|(_, device)| major(device) != major(first_device)) {
        return Decision::Host(format!(
            "rank {} has NCCL {}, but rank {} has {}: install the same on all machines, or point BURN_DDP_NCCL to it",
            first.rank,
            version_text(first_device.nccl_version),
            other.rank,
            version_text(device.nccl_version),
        ));
    }
    let mut owners: HashMap<&str, &RankInfo> = HashMap::new();
    for (info, device) in &devices {
        let Some(owner) = owners.insert(&device.uuid, info) else { continue };
        let shares = |info: &RankInfo| info.may_share && info.device.as_ref().is_ok_and(|d| d.nccl_version >= SHARING);
        if !(shares(owner) && shares(info)) {
            return Decision::Host(format!(
                "ranks {} and {} share one GPU ({} at {}), which NCCL refuses: start one rank per GPU, or set \
                 NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later",
                owner.rank, info.rank, device.name, device.pci_bus_id
            ));
        }
    }
    Decision::Nccl
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: usize, uuid: &str, nccl_version: i32) -> RankInfo {
        let device = DeviceInfo {
            ordinal: 0,
            device_count: 8,
            name: "NVIDIA H200".to_owned(),
            pci_bus_id: "0000:19:00.0".to_owned(),
            uuid: uuid.to_owned(),
            cuda_version: 12080,
            nccl_version,
        };
        RankInfo { rank, device: Ok(device), may_share: false }
    }

    fn sharing(info: RankInfo) -> RankInfo {
        RankInfo { may_share: true, ..info }
    }

    #[test]
    fn all_ranks_need_all_of_it() {
        let without =
            RankInfo { rank: 1, device: Err("no NVIDIA driver on this machine".to_owned()), may_share: false };
        let table: [(&[RankInfo], Option<&[&str]>); 9] = [
            (&[rank(0, "a", 22907)], None),
            (&[rank(0, "a", 22907), rank(1, "b", 22102)], None),
            (&[rank(0, "a", 22907), without], Some(&["rank 1 cannot use NCCL: no NVIDIA driver"])),
            (
                &[rank(0, "a", 22907), rank(1, "b", 30000)],
                Some(&["rank 0 has NCCL 2.29.7", "rank 1 has 3.0.0", "BURN_DDP_NCCL"]),
            ),
            (
                &[rank(0, "a", 23000), rank(1, "b", 23000), rank(2, "a", 23000)],
                Some(&["ranks 0 and 2 share one GPU", "one rank per GPU"]),
            ),
            (&[sharing(rank(0, "a", 23000)), sharing(rank(1, "a", 23003))], None),
            (&[sharing(rank(0, "a", 22907)), sharing(rank(1, "a", 22907))], Some(&["NCCL 2.30"])),
            (&[sharing(rank(0, "a", 23000)), rank(1, "a", 23000)], Some(&["NCCL_MULTI_RANK_GPU_ENABLE=1"])),
            (&[], Some(&["no ranks"])),
        ];
        for (ranks, says) in table {
            match (decide(ranks), says) {
                (Decision::Nccl, None) => {}
                (Decision::Host(why), Some(says)) => says.iter().for_each(|part| assert!(why.contains(part), "{why}")),
                (decision, _) => panic!("{decision:?} for {ranks:?}"),
            }
        }
    }
}
