//! Reads and visits that pass the taps by, as if the model were not wrapped, and maps that step each element by itself.

use std::any::Any;
use std::cell::{Cell, RefCell};

use burn::module::ParamMapper;
use burn::tensor::Tensor;

/// Behaviour of taps on a thread.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Taps {
    Work,
    /// As usual, but maps treat each element by itself, so they may step this rank's rows of a sharded parameter.
    StepElements,
    Bypassed,
    /// Bypassed, but for maps: these note that all ranks give the parameter another value.
    Replaced,
}

/// State of the taps on a thread.
struct OnThread {
    taps: Cell<Taps>,
    /// Question to the save mapper that is called next, and its answer.
    mapper: RefCell<Question>,
}

/// Question to a save mapper of this crate, and the answer.
enum Question {
    NotAsked,
    Asked,
    Answered(Wrapped),
}

/// What a save mapper of this crate says of itself.
struct Wrapped {
    /// The `ParamMapper` that it wraps.
    inner: Box<dyn Any>,
    /// Why the value is not whole, if it is this rank's part of a sharded parameter.
    why_part: Option<&'static str>,
}

thread_local! {
    static ON_THREAD: OnThread = const {
        OnThread {
            taps: Cell::new(Taps::Work),
            mapper: RefCell::new(Question::NotAsked),
        }
    };
}

/// Runs `f`, whose maps treat each element of a parameter by itself.
pub(crate) fn element_wise<T>(f: impl FnOnce() -> T) -> T {
    within(Taps::StepElements, f)
}

/// Runs `f` with parameters read and visited as if they had no tap.
pub(crate) fn bypass<T>(f: impl FnOnce() -> T) -> T {
    within(Taps::Bypassed, f)
}

/// [`bypass`] for an `f` whose maps replace the value of every parameter on all ranks alike.
pub(crate) fn replace<T>(f: impl FnOnce() -> T) -> T {
    within(Taps::Replaced, f)
}

fn within<T>(taps: Taps, f: impl FnOnce() -> T) -> T {
    struct Restore(Taps);
    impl Drop for Restore {
        fn drop(&mut self) {
            ON_THREAD.with(|on_thread| on_thread.taps.set(self.0));
        }
    }
    let _restore = Restore(ON_THREAD.with(|on_thread| on_thread.taps.replace(taps.max(on_thread.taps.get()))));
    f()
}

fn taps() -> Taps {
    ON_THREAD.with(|on_thread| on_thread.taps.get())
}

/// True inside [`bypass`] and [`replace`] on this thread.
pub(crate) fn is_bypassed() -> bool {
    taps() >= Taps::Bypassed
}

/// True inside [`element_wise`] on this thread.
pub(super) fn steps_elements() -> bool {
    taps() == Taps::StepElements
}

/// True inside [`replace`] on this thread.
pub(super) fn is_replacing() -> bool {
    taps() == Taps::Replaced
}

/// True if [`ask`] asks the save mapper that calls this which mapper it wraps: `inner` is the answer, and the mapper
/// returns its value as it is. `why_part` says why that is this rank's part of a sharded parameter, if it is.
pub(crate) fn answers<const D: usize>(inner: &ParamMapper<Tensor<D>>, why_part: Option<&'static str>) -> bool {
    ON_THREAD.with(|on_thread| {
        let mut question = on_thread.mapper.borrow_mut();
        let asked = matches!(*question, Question::Asked);
        if asked {
            *question = Question::Answered(Wrapped { inner: Box::new(inner.clone()), why_part });
        }
        asked
    })
}

/// The mapper that `mapper` wraps, if it is one of this crate, and why `value` is a part, if it is.
pub(super) fn ask<const D: usize>(
    mapper: &ParamMapper<Tensor<D>>,
    value: &Tensor<D>,
) -> Option<(ParamMapper<Tensor<D>>, Option<&'static str>)> {
    ON_THREAD.with(|on_thread| on_thread.mapper.replace(Question::Asked));
    mapper.on_save(value.clone());
    match ON_THREAD.with(|on_thread| on_thread.mapper.replace(Question::NotAsked)) {
        Question::Answered(Wrapped { inner, why_part }) => Some((*inner.downcast().ok()?, why_part)),
        _ => None,
    }
}
