//! Burn backends that burn-ddp supports, each behind a feature.

/// Implements a backend extension for all backends that are built in, by these methods and the default bodies of the
/// others.
macro_rules! extend_backends {
    ($extension:ident { $($method:item)* }) => {
        #[cfg(feature = "flex")]
        impl $extension for burn::backend::Flex { $($method)* }
        #[cfg(feature = "ndarray")]
        impl $extension for burn::backend::NdArray { $($method)* }
        #[cfg(feature = "tch")]
        impl $extension for burn::backend::LibTorch { $($method)* }
        #[cfg(feature = "cube")]
        impl $extension for burn::backend::Cube { $($method)* }
    };
}
pub(crate) use extend_backends;
