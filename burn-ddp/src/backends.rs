//! Burn backends that burn-ddp supports, each behind a feature.

/// Implements a backend extension, by its default bodies, for all of them.
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
