//! Which device a rank computes on.

use burn::backend::DispatchDevice;
use burn::tensor::Device;

use crate::{Error, Result};

/// The CPU backend; accelerators come with their own features.
pub(crate) fn default_device() -> Result<Device> {
    #[cfg(feature = "flex")]
    {
        Ok(Device::flex())
    }
    #[cfg(not(feature = "flex"))]
    {
        Err(Error::Use("burn-ddp was built without a backend: enable its feature `flex`".into()))
    }
}

/// Whether the taps work on this device, else what to do.
pub(crate) fn check_supported(device: &Device) -> Result<()> {
    let plain = device.clone().without_autodiff();
    match plain.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => Ok(()),
        #[allow(unreachable_patterns)] // with one backend built in, nothing else can come
        _ => Err(Error::Use(format!(
            "burn-ddp has no support for {device:?} built in: enable the feature of burn-ddp that is named like its backend (today: `flex`)"
        ))),
    }
}
