//! An identity whose backward panics, or mixes types, on the thread that armed it.
#![allow(deprecated)]

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::Cube;
#[cfg(feature = "tch")]
use burn::backend::LibTorch;
#[cfg(feature = "ndarray")]
use burn::backend::NdArray;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::{
    Autodiff,
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{FloatDType, Tensor};

thread_local!(static ARMED: std::cell::Cell<Option<Fault>> = const { std::cell::Cell::new(None) });

#[derive(Clone, Copy)]
enum Fault {
    Panics,
    Widens,
}

/// Runs `f` while backwards through [`trap`] on this thread panic.
pub fn armed<T>(f: impl FnOnce() -> T) -> T {
    with(Fault::Panics, f)
}

/// Runs `f` while backwards through [`trap`] on this thread return f32, as kernels may that do not look at types.
pub fn widening<T>(f: impl FnOnce() -> T) -> T {
    with(Fault::Widens, f)
}

fn with<T>(fault: Fault, f: impl FnOnce() -> T) -> T {
    struct Disarm;
    impl Drop for Disarm {
        fn drop(&mut self) {
            ARMED.set(None);
        }
    }
    let _disarm = Disarm;
    ARMED.set(Some(fault));
    f()
}

/// Returns `x`; its backward fails on a thread that runs [`armed`] or [`widening`].
pub fn trap<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::bomb(x.into_dispatch()))
}

/// The operation.
#[backend_extension(
    Flex,
    NdArray: cfg(feature = "ndarray"),
    LibTorch: cfg(feature = "tch"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Autodiff
)]
pub trait Bomb: Backend {
    /// Returns `x`.
    fn bomb(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

impl Bomb for Flex {}
#[cfg(feature = "ndarray")]
impl Bomb for NdArray {}
#[cfg(feature = "tch")]
impl Bomb for LibTorch {}
#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl Bomb for Cube {}

impl<B: Bomb, C: CheckpointStrategy> Bomb for Autodiff<B, C> {
    fn bomb(x: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Fuse;
        impl<B: Backend> Backward<B, 1> for Fuse {
            type State = ();
            fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let gradient = grads.consume::<B>(&ops.node);
                let gradient = match ARMED.get() {
                    Some(Fault::Panics) => panic!("the bomb went off"),
                    Some(Fault::Widens) => B::float_cast(gradient, FloatDType::F32),
                    None => gradient,
                };
                grads.register::<B>(ops.parents[0].as_ref().unwrap().id, gradient);
            }
        }
        let (primitive, guard) = x.into_parts();
        match Backward::<B, 1>::prepare::<C>(Fuse, [guard]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}
