//! `burnrun devices`: the GPUs of this machine.

use std::ffi::OsString;
use std::fs;

use clap::Parser;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use serde::Serialize;

/// Lists the GPUs of this machine: number, name, memory and load, and the driver
#[derive(Debug, Parser)]
#[command(name = "burnrun devices", bin_name = "burnrun devices")]
struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// GPUs, as the driver lists them.
#[derive(Debug, Default, Serialize)]
pub(super) struct Devices {
    /// The driver's version.
    pub(super) driver: Option<String>,
    /// The newest CUDA that the driver can run.
    pub(super) cuda: Option<String>,
    pub(super) devices: Vec<Device>,
    /// Reason why no GPU is listed; `None` if at least one is.
    pub(super) note: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Device {
    index: u32,
    name: String,
    uuid: Option<String>,
    memory_used_bytes: Option<u64>,
    memory_total_bytes: Option<u64>,
    /// Load in the last second or so.
    busy_percent: Option<u32>,
}

pub(super) fn main(words: &[OsString]) -> i32 {
    let args: Args = super::parse(words);
    let found = list();
    let text = if args.json {
        serde_json::to_string_pretty(&found).map(|json| format!("{json}\n")).unwrap_or_default()
    } else {
        found.table()
    };
    // Fails if a pager was closed early, which is no error.
    let _ = std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes());
    0
}

impl Devices {
    fn table(&self) -> String {
        let mut text = String::new();
        if let Some(driver) = &self.driver {
            let cuda = self.cuda.as_ref().map(|cuda| format!(", CUDA up to {cuda}")).unwrap_or_default();
            text += &format!("NVIDIA driver {driver}{cuda}\n");
        }
        let gib =
            |bytes: Option<u64>| bytes.map_or("?".into(), |bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 30)));
        for device in &self.devices {
            let Device { index, name, memory_used_bytes, memory_total_bytes, busy_percent, .. } = device;
            let (used, total) = (gib(*memory_used_bytes), gib(*memory_total_bytes));
            let busy = busy_percent.map(|percent| format!(", {percent} % busy")).unwrap_or_default();
            text += &format!("{index}: {name}, {used} of {total} GiB used{busy}\n");
        }
        text + &self.note.as_ref().map(|note| format!("{note}\n")).unwrap_or_default()
    }
}

/// All GPUs, whatever CUDA_VISIBLE_DEVICES says.
pub(super) fn list() -> Devices {
    match query() {
        Ok(found) if found.devices.is_empty() => {
            Devices { note: Some("there is an NVIDIA driver, but no GPU".into()), ..found }
        }
        Ok(found) => found,
        Err(error) => Devices { note: Some(why_none(&error)), ..Devices::default() },
    }
}

/// Number of GPUs that the ranks may use: by the driver, or else by the files in `/dev`, within CUDA_VISIBLE_DEVICES.
pub(super) fn visible_count() -> Option<usize> {
    let count = match query() {
        Ok(found) => found.devices.len(),
        Err(_) => device_files(),
    };
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    Some(visible.map_or(count, |list| listed(&list).min(count)))
}

/// Number of entries that CUDA uses: those before the first that names no device.
fn listed(list: &str) -> usize {
    list.split(',').map(str::trim).take_while(|entry| !entry.is_empty() && *entry != "-1").count()
}

fn query() -> Result<Devices, NvmlError> {
    // The name that a driver installs; the name without `.1` is part of developer packages.
    let nvml = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init()?;
    let cuda = nvml.sys_cuda_driver_version().ok().map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
    let mut devices = Vec::new();
    for index in 0..nvml.device_count()? {
        let device = nvml.device_by_index(index)?;
        let memory = device.memory_info().ok();
        devices.push(Device {
            index,
            name: device.name()?,
            uuid: device.uuid().ok(),
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
            memory_total_bytes: memory.as_ref().map(|memory| memory.total),
            busy_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        });
    }
    Ok(Devices { driver: nvml.sys_driver_version().ok(), cuda, devices, note: None })
}

fn why_none(error: &NvmlError) -> String {
    match (error, device_files()) {
        (NvmlError::LibloadingError(_), 0) => {
            "there is no NVIDIA GPU here, or no driver for it; ranks use the processor".into()
        }
        (NvmlError::LibloadingError(error), n) => {
            let own = if cfg!(target_feature = "crt-static") {
                " (this burnrun is a static build, which loads no libraries)"
            } else {
                ""
            };
            format!("there are {n} NVIDIA devices, but the driver's library cannot be loaded{own}: {error}")
        }
        (error, _) => format!("the NVIDIA driver does not answer: {error}"),
    }
}

/// Number of the files `/dev/nvidia0`, `/dev/nvidia1`, …
fn device_files() -> usize {
    let names = fs::read_dir("/dev").into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_gpu = |name: OsString| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia")).map(str::to_owned);
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    names.filter(|name| is_gpu(name.clone())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_counted_as_cuda_does() {
        for (list, count) in [("", 0), ("0", 1), ("0,2", 2), ("-1", 0), ("1,-1,2", 1), ("GPU-1a, GPU-2b", 2)] {
            assert_eq!(listed(list), count, "{list:?}");
        }
    }

    #[test]
    fn a_table_tells_all_or_why_not() {
        let device = Device {
            index: 0,
            name: "H200".into(),
            uuid: None,
            memory_used_bytes: Some(3 << 30),
            memory_total_bytes: Some(139 << 30),
            busy_percent: None,
        };
        let found =
            Devices { driver: Some("580.1".into()), cuda: Some("13.0".into()), devices: vec![device], note: None };
        assert_eq!(found.table(), "NVIDIA driver 580.1, CUDA up to 13.0\n0: H200, 3.0 of 139.0 GiB used\n");
        assert_eq!(Devices { note: Some("none".into()), ..Devices::default() }.table(), "none\n");
    }
}
