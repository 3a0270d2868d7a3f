//! A model cut into parts, and made whole again for files, hashes and `unwrap`.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};

use super::shard_group::Purpose;
use crate::agreement::tell_peers;
use crate::intercept::model_walk::{AtTap, Path, find, walk};
use crate::intercept::save_mappers::why_part;
use crate::intercept::tap_bypass::bypass;
use crate::intercept::tap_handle::TapHandle;
use crate::intercept::wrapped_model::{StepOf, WrappedModel};
use crate::model::schema::unreadable;
use crate::tensor_conversion::data_of;
use crate::{Error, Result};

/// `param` with only these rows of its value, in memory of their own.
pub(crate) fn cut<const D: usize>(param: Param<Tensor<D>>, rows: Range<usize>) -> Param<Tensor<D>> {
    let (id, whole, mapper) = param.consume();
    let trains = whole.is_require_grad();
    Param::from_mapped_value(id, own_rows(whole, rows).set_require_grad(trains), mapper)
}

/// These rows of `whole`, which is on an autodiff device, in memory of their own and without a graph.
pub(crate) fn own_rows<const D: usize>(whole: Tensor<D>, rows: Range<usize>) -> Tensor<D> {
    let (device, dtype) = (whole.device(), whole.dtype());
    // A slice of the tracked value would hold the whole in the graph.
    Tensor::from_data(whole.inner().slice_dim(0, rows).into_data(), (&device, dtype))
}

/// True if `model` has sharded parameters.
fn is_sharded<M: Module>(model: &M) -> bool {
    find(model).iter().any(|wrapped| wrapped.shards().is_some())
}

/// Ends the waits of the other ranks for this rank's parts of `model`, if it has some, with an error of this rank.
pub(crate) fn tell_peers_of_parts<M: Module>(model: &M, error: &Error) {
    find(model).iter().filter(|wrapped| wrapped.shards().is_some()).for_each(|wrapped| tell_peers(&wrapped.ddp, error));
}

/// Refuses to do `what` with a model that has sharded parameters.
pub(crate) fn refuse_sharded<M: Module>(model: &M, what: &str, instead: &str) -> Result<()> {
    match is_sharded(model) {
        false => Ok(()),
        true => Err(Error::invalid(format!("{what} with sharded parameters in the model is not possible: {instead}"))),
    }
}

/// Refuses a model with a parameter whose tap is gone and which is this rank's part: it would pass for a whole one.
pub(crate) fn refuse_parts_without_tap<M: Module>(model: &M) -> Result<()> {
    struct Find(Option<String>);
    impl AtTap for Find {
        type Seen = Box<dyn FnOnce() -> Option<&'static str>>;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            let param = param.clone();
            Some(Box::new(|| why_part(param)))
        }

        fn leave(&mut self, path: &Path, why_part: Self::Seen, tap: Option<TapHandle>) {
            if self.0.is_none() && tap.is_none() {
                let refused = |why| format!("{path} holds this rank's rows of a sharded parameter and {why}");
                self.0 = why_part().map(refused);
            }
        }
    }
    let mut find = Find(None);
    walk(model, &mut find);
    find.0.map_or(Ok(()), |refused| Err(Error::invalid(refused)))
}

/// Paths of the sharded parameters, as they are in `model`: it may be a part of the model that was wrapped, or hold it.
pub(crate) fn sharded_paths<M: Module>(model: &M) -> HashSet<String> {
    sharded_parameters(model).into_iter().map(|parameter| parameter.path).collect()
}

/// A sharded parameter of a module.
pub(crate) struct ShardedParameter {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    /// Shape of the whole.
    pub(crate) dims: Vec<usize>,
    /// True if it requires a gradient.
    pub(crate) trains: bool,
    pub(super) tap: TapHandle,
}

impl ShardedParameter {
    /// The parameter, for the optimizer that steps it.
    pub(crate) fn slot(&self) -> SteppedSlot {
        SteppedSlot { model: Arc::downgrade(&self.tap.model), slot: self.tap.slot }
    }
}

/// A sharded parameter that an optimizer steps. Does not keep its model.
#[derive(Clone, Debug)]
pub(crate) struct SteppedSlot {
    model: Weak<WrappedModel>,
    slot: usize,
}

impl SteppedSlot {
    /// Equal for equal parameters.
    fn key(&self) -> (*const WrappedModel, usize) {
        (self.model.as_ptr(), self.slot)
    }

    /// Notes that an optimizer steps the parameter element by element.
    pub(crate) fn note_optimizer(&self) {
        self.with_model(|model| model.note_optimizer(self.slot));
    }

    fn with_model(&self, f: impl FnOnce(&WrappedModel)) {
        if let Some(model) = self.model.upgrade() {
            f(&model);
        }
    }
}

/// Runs `step`, in which an optimizer of Burn that treats each element of the parameters `fits` by itself steps `model`
/// by `grads`.
pub(crate) fn step_by_elements<M: Module, T>(
    fits: &[SteppedSlot],
    model: M,
    grads: GradientsParams,
    step: impl FnOnce(M, GradientsParams) -> T,
) -> T {
    struct Find<'a>(&'a GradientsParams, Vec<(SteppedSlot, bool)>);
    impl AtTap for Find<'_> {
        /// True if the parameter has a gradient.
        type Seen = bool;

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<bool> {
            Some(self.0.get::<D>(param.id).is_some())
        }

        fn leave(&mut self, _: &Path, has_gradient: bool, tap: Option<TapHandle>) {
            if let Some(tap) = tap.filter(|tap| tap.model.is_divided(tap.slot)) {
                self.1.push((SteppedSlot { model: Arc::downgrade(&tap.model), slot: tap.slot }, has_gradient));
            }
        }
    }
    struct End(Vec<(SteppedSlot, bool)>);
    impl Drop for End {
        fn drop(&mut self) {
            self.0.iter().for_each(|(of, _)| of.with_model(|model| model.note_step_of(of.slot, StepOf::Unknown)));
        }
    }
    let mut find = Find(&grads, Vec::new());
    walk(&model, &mut find);
    let fits: HashSet<_> = fits.iter().map(SteppedSlot::key).collect();
    for (of, has_gradient) in &find.1 {
        let step = match (has_gradient, fits.contains(&of.key())) {
            (false, _) => StepOf::Nothing,
            (true, true) => StepOf::Elements,
            (true, false) => StepOf::Unknown,
        };
        of.with_model(|model| model.note_step_of(of.slot, step));
    }
    let _end = End(find.1);
    step(model, grads)
}

/// The sharded parameters of `model`.
pub(crate) fn sharded_parameters<M: Module>(model: &M) -> Vec<ShardedParameter> {
    struct Find(Vec<ShardedParameter>);
    impl AtTap for Find {
        type Seen = (ParamId, bool);

        fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Self::Seen> {
            Some((param.id, param.is_require_grad()))
        }

        fn leave(&mut self, path: &Path, (id, trains): Self::Seen, tap: Option<TapHandle>) {
            if let Some(tap) = tap.filter(|tap| tap.model.is_divided(tap.slot)) {
                let dims = tap.model.slots[tap.slot].dims.clone();
                self.0.push(ShardedParameter { path: path.to_string(), id, dims, trains, tap });
            }
        }
    }
    let mut find = Find(Vec::new());
    walk(model, &mut find);
    find.0
}

/// `model` with each sharded parameter made whole, one after the other. *Collective* if there are sharded parameters.
///
/// The model still has its taps, so it must only be used in [`bypass`].
pub(crate) fn whole<M: Module>(model: M) -> Result<M> {
    if !is_sharded(&model) {
        return Ok(model);
    }
    struct Taps(VecDeque<Option<TapHandle>>);
    impl AtTap for Taps {
        type Seen = ();

        fn parameter<const D: usize>(&mut self, _: &Param<Tensor<D>>) -> Option<()> {
            self.0.push_back(None);
            Some(())
        }

        fn leave(&mut self, _: &Path, (): (), tap: Option<TapHandle>) {
            if let Some(last) = self.0.back_mut() {
                *last = tap.filter(|tap| tap.model.is_sharded(tap.slot));
            }
        }
    }
    let mut taps = Taps(VecDeque::new());
    walk(&model, &mut taps);
    let mut gather = Gather { taps: taps.0, error: None };
    let model = bypass(|| model.map(&mut gather));
    gather.error.map_or(Ok(model), Err)
}

struct Gather {
    /// Tap of each float parameter and buffer to come, if it is sharded.
    taps: VecDeque<Option<TapHandle>>,
    /// The first error; nothing is gathered after it.
    error: Option<Error>,
}

impl ModuleMapper for Gather {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(Some(tap)) = self.taps.pop_front() else { return param };
        if self.error.is_some() {
            return param;
        }
        let (id, part, mapper) = param.consume();
        let value = match gathered(&tap, &part) {
            Ok(Some(data)) => {
                let whole = Tensor::from_data(data, (&part.device(), part.dtype()));
                whole.set_require_grad(part.is_require_grad())
            }
            Ok(None) => part,
            Err(error) => {
                self.error = Some(error);
                part
            }
        };
        Param::from_mapped_value(id, value, mapper)
    }
}

fn gathered<const D: usize>(tap: &TapHandle, part: &Tensor<D>) -> Result<Option<TensorData>> {
    let TapHandle { model, slot, value_id, .. } = tap;
    let Some(shards) = model.shards() else { return Ok(None) };
    let s = &model.slots[*slot];
    let data = data_of(part.clone()).map_err(|e| unreadable(&s.path, &e));
    let data = data.inspect_err(|e| tell_peers(&model.ddp, e))?;
    let bytes = shards.gather(*slot, *value_id, data.as_bytes(), Purpose::Whole)?;
    Ok(Some(TensorData::from_bytes(bytes, s.dims.clone(), data.dtype())))
}
