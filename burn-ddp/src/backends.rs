//! Burn backends that burn-ddp supports, each behind a feature.

/// Implements a backend extension for all backends that are built in, with the default bodies of its methods.
macro_rules! extend_backends {
    ($extension:ident) => {
        #[cfg(feature = "flex")]
        impl $extension for burn::backend::Flex {}
        #[cfg(feature = "ndarray")]
        impl $extension for burn::backend::NdArray {}
        #[cfg(feature = "tch")]
        impl $extension for burn::backend::LibTorch {}
        #[cfg(feature = "cube")]
        impl $extension for burn::backend::Cube {}
    };
}
pub(crate) use extend_backends;
