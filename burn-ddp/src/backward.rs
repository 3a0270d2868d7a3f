//! The door to a step: [`Ddp::backward`], and what else begins and ends a backward of wrapped models.

use burn::tensor::{Gradients, Tensor};
use burn_ddp_comm::ReduceOp;

use crate::ddp::Ddp;
use crate::intercept::{self, Call, Models, Own, Prepared, Trained};
use crate::wrap::refuse_accumulation;
use crate::{Error, Result};

/// [`Ddp`] with a weight for its next backward, from [`Ddp::weighted`].
#[derive(Clone, Copy, Debug)]
pub struct Weighted<'a> {
    ddp: &'a Ddp,
    items: Option<f64>,
}

impl Ddp {
    /// Runs `loss.backward()`, averages the gradients of `models` over all ranks, and returns the averages for the
    /// optimizer. *Collective* for the ranks that hold the models.
    ///
    /// `models` is a wrapped model (`&model`), or several that the loss depends on, or parts of one, in a tuple
    /// (`(&model.trunk, &model.head)`), which yields a tuple of gradients. Every rank gets gradients with the same ids:
    /// of each parameter that some rank has used. `grads.get(param.id)` is one of them. Gradients of wrapped models
    /// that the call does not name are dropped, without communication.
    ///
    /// `None` means that this micro-batch only adds up, so there is no step now:
    /// [accumulation](crate::WrapConfig::with_accumulation) has more micro-batches to come. The last batch of a
    /// [loader](Ddp::loader)'s epoch completes the step however few it has; other loops call [`flush`](Ddp::flush).
    ///
    /// The backward weighs what the last batch of a training loader weighs, as often as it is called before the next
    /// batch, and 1 without a loader; [`weighted`](Ddp::weighted) says otherwise. Two batches handed out since the last
    /// call are an error.
    ///
    /// Costs what Burn's backward costs and one all-reduce per [bucket](crate::WrapConfig::with_bucket_cap_bytes),
    /// which is two steps in which a rank sends about `2 b` bytes for `b` bytes of gradients (one step for small
    /// buckets); it runs while backward goes on. Running statistics add one all-reduce per dtype;
    /// [comparisons of replicas](crate::WrapConfig::with_replica_check) add a gather of 8 bytes per parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a peer failed; [`Error::ReplicasDiffer`] if a comparison of replicas fails;
    /// [`Error::Backward`] if the model is not wrapped, the loss does not depend on it, or the backward cannot deliver
    /// averages. Every rank gets the error. Nothing of the call remains: held micro-batches of the models are dropped,
    /// their running statistics are those before the step. [`Error::job_usable`] says whether the next call may follow.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let x = Tensor::<2>::full([1, 1], ddp.rank() as f64, &device);
    ///     let grads = ddp.backward(&model.forward(x.clone()).sum(), &model)?.expect("a step");
    ///     assert_eq!(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>(), 0.5); // of 0 and 1
    ///
    ///     let loss = model.forward(x).detach().sum(); // a bug
    ///     let error = ddp.backward(&loss, &model).err().unwrap();
    ///     assert!(error.to_string().contains("the loss depends on no parameter"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn backward<const D: usize, T: Trained>(&self, loss: &Tensor<D>, models: T) -> Result<Option<T::Gradients>> {
        self.by_loader().backward(loss, models)
    }

    /// Runs `loss.backward()`, whose gradients only add up until the next [`backward`](Ddp::backward) or
    /// [`flush`](Ddp::flush) reduces them. The average is then the mean over the items of all micro-batches and ranks,
    /// also in a world of 1. For an irregular number of micro-batches, which may differ between ranks. Not collective.
    ///
    /// # Errors
    ///
    /// [`Error::Backward`] as for [`Ddp::backward`], and for models with
    /// [local parameters](crate::WrapConfig::with_local_parameters) that are trained.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     # let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let loss = |x: f64| model.forward(Tensor::<2>::full([1, 1], x, &device)).sum();
    ///     for _ in 0..ddp.rank() {
    ///         ddp.accumulate(&loss(4.0), &model)?; // one more micro-batch on rank 1
    ///     }
    ///     let grads = ddp.backward(&loss(1.0), &model)?.expect("a step");
    ///     Ok(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(gradients, [2.0, 2.0]); // the mean of 1, 4 and 1
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn accumulate<const D: usize, T: Trained>(&self, loss: &Tensor<D>, models: T) -> Result<()> {
        self.by_loader().accumulate(loss, models)
    }

    /// Runs `f`, code of others that calls `loss.backward()` itself, exactly once and on this thread, and returns its
    /// result beside the averaged gradients, which are those of [`backward`](Ddp::backward). *Collective* for the ranks
    /// that hold the models.
    ///
    /// `f` may keep Burn's `Gradients`, for gradients of inputs; they have none of the models' parameters. A panic of
    /// `f` goes on, and abandons the step.
    ///
    /// # Errors
    ///
    /// Those of [`backward`](Ddp::backward); if no backward of `f` reached the models, or two did; and for models with
    /// [local parameters](crate::WrapConfig::with_local_parameters) that are trained. Reads of parameters past `val()`
    /// are not noticed, as this call does not see `Gradients`.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let input = Tensor::<2>::full([1, 1], ddp.rank() as f64, &device).require_grad();
    ///     let (own, grads) = ddp.scope(&model, || model.forward(input.clone()).sum().backward())?;
    ///     let grads = grads.expect("a step");
    ///     assert_eq!(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>(), 0.5);
    ///     assert!(input.grad(&own).is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn scope<R, T: Trained>(&self, models: T, f: impl FnOnce() -> R) -> Result<(R, Option<T::Gradients>)> {
        self.by_loader().scope(models, f)
    }

    /// Reduces the gradients of micro-batches that no [`backward`](Ddp::backward) has reduced, and returns their
    /// averages for the optimizer; `None` if no rank holds any. *Collective*.
    ///
    /// Loops with accumulation that do not read [`Ddp::loader`] call it at the end of each epoch, on **every rank** at
    /// the same place, and so do loops over it that leave an epoch early. Ranks may hold different numbers of
    /// micro-batches, or none. Costs an all-reduce of one byte; if a rank holds gradients, also the communication of
    /// [`backward`](Ddp::backward).
    ///
    /// # Errors
    ///
    /// Those of [`backward`](Ddp::backward).
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::SgdConfig;
    /// # use burn::prelude::*;
    /// # use burn_ddp::prelude::*;
    /// let moved = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = LinearConfig::new(1, 1).init(&device);
    ///     let mut model = ddp.wrap_with(model, &WrapConfig::new().with_accumulation(2))?;
    ///     let mut optim = SgdConfig::new().init();
    ///     let before = model.weight.val().into_scalar::<f32>();
    ///     let files = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]; // three micro-batches, two to a step
    ///     for x in files[ddp.rank()] {
    ///         let loss = model.forward(Tensor::<2>::from_floats([[x]], &device)).sum();
    ///         if let Some(grads) = ddp.backward(&loss, &model)? {
    ///             model = optim.step(1.0, model, grads); // by (1 + 4 + 2 + 5) / 4
    ///         }
    ///     }
    ///     if let Some(grads) = ddp.flush(&model)? {
    ///         model = optim.step(1.0, model, grads); // by (3 + 6) / 2
    ///     }
    ///     Ok(before - model.weight.val().into_scalar::<f32>())
    /// })?;
    /// assert!(moved.iter().all(|moved| (moved - 7.5).abs() < 1e-5));
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn flush<T: Trained>(&self, models: T) -> Result<Option<T::Gradients>> {
        let mut found = self.find(&models)?;
        found.0.sort_by_key(|model| model.id());
        let mut held: Vec<u8> = found.0.iter().map(|model| u8::from(model.holds_gradients())).collect();
        self.group().all_reduce(&mut held, ReduceOp::Max)?;
        let of_some = found.0.iter().zip(&held).filter(|(_, held)| **held > 0);
        let held: Vec<_> = of_some.map(|(model, _)| model.clone()).collect();
        if held.is_empty() {
            return Ok(None);
        }
        note_values(&found, &models);
        let prepared = models.prepare(&found, Own::Unknown).map_err(|error| intercept::refused(self, error))?;
        let reduced = intercept::reduce_held(self, held)?;
        Ok(gradients::<T>(&found, reduced.then_some(prepared)))
    }

    /// The same calls with a weight for their backward in the average: the number of items (or tokens) over which this
    /// rank's loss is a mean. Only needed without a loader of burn-ddp, with two of them in one step, and for 0, at
    /// which the gradients of this rank do not count, even NaN. See [`weigh`](crate::data::LoaderBuilder::weigh) for
    /// tokens.
    ///
    /// The call is an error if `items` is negative or not finite.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// let gradients = Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     # let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let items = [3, 1][ddp.rank()]; // rank 0 has 3 items, rank 1 has 1
    ///     let x = Tensor::<2>::full([items, 1], ddp.rank() as f64, &device);
    ///     let grads = ddp.weighted(items as f64).backward(&model.forward(x).mean(), &model)?.expect("a step");
    ///     Ok(grads.get::<2>(model.weight.id).unwrap().into_scalar::<f32>())
    /// })?;
    /// assert_eq!(gradients, [0.25, 0.25]); // of four items one has x = 1
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[must_use]
    pub fn weighted(&self, items: f64) -> Weighted<'_> {
        Weighted { ddp: self, items: Some(items) }
    }

    /// Says that the last batch of the training loader gets no backward: one that all ranks leave out. Every rank calls
    /// it; a rank that leaves out a batch alone gives it the weight 0 instead. It communicates nothing: if some ranks
    /// have called it more often than others, the next reduction is an error.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`] if a peer has left the epoch before this batch.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn::data::dataloader::batcher::Batcher;
    /// # use burn::data::dataset::InMemDataset;
    /// # use burn_ddp::prelude::*;
    /// # struct Stack;
    /// # impl Batcher<f32, Tensor<2>> for Stack {
    /// #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
    /// #         Tensor::<1>::from_floats(&items[..], device).unsqueeze_dim(1)
    /// #     }
    /// # }
    /// let steps = Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let items = InMemDataset::new(vec![1.0, 2.0, f32::NAN, f32::NAN, 5.0, 6.0]);
    ///     let train = ddp.loader(Stack).batch_size(1).set_device(device).build(items)?;
    ///     let mut steps = 0;
    ///     for batch in train.iter() {
    ///         let loss = model.forward(batch?).mean();
    ///         if ddp.sum(loss.clone().into_scalar::<f32>())?.is_nan() {
    ///             ddp.skip_batch()?; // on every rank
    ///             continue;
    ///         }
    ///         steps += usize::from(ddp.backward(&loss, &model)?.is_some());
    ///     }
    ///     Ok(steps)
    /// })?;
    /// assert_eq!(steps, [2, 2]);
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn skip_batch(&self) -> Result<()> {
        self.state().skip_batch()
    }

    fn by_loader(&self) -> Weighted<'_> {
        Weighted { ddp: self, items: None }
    }

    /// The wrapped models of a call.
    fn find<T: Trained>(&self, models: &T) -> Result<Models> {
        let mut found = Models::default();
        let outcome = models.find(self.group(), &mut found).and_then(|()| match found.0.is_empty() {
            false => Ok(()),
            true => Err(Error::invalid("the model is not wrapped: use what `ddp.wrap(model)` returned")),
        });
        outcome.map_err(|error| intercept::refused(self, error))?;
        Ok(found)
    }
}

/// The loss for a backward that the program makes itself, in [`Ddp::scope`] or in Burn's `TrainStep`: times the [loss
/// scale](crate::WrapConfig::with_loss_scaling) of the models that the call trains. Anywhere else, and for models
/// without a scale, that is the loss. [`Ddp::backward`] does the same by itself.
///
/// In a call over models with a scale, a backward of a loss that was not scaled is an error. What the program takes out
/// of Burn's `Gradients` by itself (a gradient of an input) has the scale, that of
/// [`Telemetry::loss_scale`](crate::Telemetry::loss_scale) with one model.
///
/// # Example
///
/// ```
/// # use burn::{nn::LinearConfig, optim::GradientsParams, prelude::*};
/// # use burn_ddp::{LossScaling, Precision, prelude::*, scale_loss};
/// Ddp::spawn(2, |ddp| {
///     let device = ddp.device()?.autodiff();
///     let scaling = LossScaling { initial_scale_power: 10, ..LossScaling::default() };
///     let config = WrapConfig::new().with_compute_dtype(Precision::F16).with_loss_scaling(scaling);
///     let model = ddp.wrap_with(LinearConfig::new(4, 1).init(&device), &config)?;
///     let inputs = Tensor::<2>::ones([8, 4], &device).cast(Precision::F16.dtype());
///     let loss = model.forward(inputs).cast(Precision::F32.dtype()).mean();
///     let (_, grads) = ddp.scope(&model, || scale_loss(&loss).backward())?;
///     assert!(grads.is_some());
///     Ok(())
/// })?;
/// # Ok::<(), burn_ddp::Error>(())
/// ```
#[must_use]
pub fn scale_loss<const D: usize>(loss: &Tensor<D>) -> Tensor<D> {
    intercept::scaled(loss)
}

impl Weighted<'_> {
    /// [`Ddp::backward`] with this weight.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::backward`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     # let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let items = 1.0 + ddp.rank() as f64;
    ///     let loss = model.forward(Tensor::<2>::full([1, 1], items, &device)).sum();
    ///     let grads = ddp.weighted(items).backward(&loss, &model)?; // 1 and 2, of the weights 1 and 2
    ///     assert_eq!(grads.unwrap().get::<2>(model.weight.id).unwrap().into_scalar::<f32>(), 5.0 / 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn backward<const D: usize, T: Trained>(&self, loss: &Tensor<D>, models: T) -> Result<Option<T::Gradients>> {
        let found = self.ddp.find(&models)?;
        self.refuse_untracked(loss)?;
        note_values(&found, &models);
        let call = Call { items: self.items, holds: false, counts_backwards: false };
        let prepare = |own: &mut Gradients, counts| models.prepare(&found, Own::Gradients { own, counts });
        let (_, prepared) =
            intercept::run(self.ddp, found.0.clone(), call, || intercept::scaled(loss).backward(), prepare)?;
        Ok(gradients::<T>(&found, prepared))
    }

    /// [`Ddp::accumulate`] with this weight.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::accumulate`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     # let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let items = 1.0 + ddp.rank() as f64;
    ///     let loss = model.forward(Tensor::<2>::full([1, 1], items, &device)).sum();
    ///     ddp.weighted(items).accumulate(&loss, &model)?; // 1 and 2, of the weights 1 and 2
    ///     let grads = ddp.flush(&model)?;
    ///     assert_eq!(grads.unwrap().get::<2>(model.weight.id).unwrap().into_scalar::<f32>(), 5.0 / 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn accumulate<const D: usize, T: Trained>(&self, loss: &Tensor<D>, models: T) -> Result<()> {
        let found = self.ddp.find(&models)?;
        self.refuse_untracked(loss)?;
        let refused = found.0.iter().try_for_each(|model| refuse_accumulation("`accumulate`", model.local()));
        refused.map_err(|error| intercept::refused(self.ddp, error))?;
        let call = Call { items: self.items, holds: true, counts_backwards: false };
        let prepare = |own: &mut Gradients, counts| models.prepare(&found, Own::Gradients { own, counts });
        intercept::run(self.ddp, found.0.clone(), call, || intercept::scaled(loss).backward(), prepare).map(drop)
    }

    /// [`Ddp::scope`] with this weight.
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::scope`].
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// Ddp::spawn(2, |ddp| {
    ///     # let device = ddp.device()?.autodiff();
    ///     # let model: Linear = ddp.wrap(LinearConfig::new(1, 1).init(&device))?;
    ///     let items = 1.0 + ddp.rank() as f64;
    ///     let loss = model.forward(Tensor::<2>::full([1, 1], items, &device)).sum();
    ///     let (_, grads) = ddp.weighted(items).scope(&model, || loss.backward())?; // 1 and 2, of the weights 1 and 2
    ///     assert_eq!(grads.unwrap().get::<2>(model.weight.id).unwrap().into_scalar::<f32>(), 5.0 / 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    #[track_caller]
    pub fn scope<R, T: Trained>(&self, models: T, f: impl FnOnce() -> R) -> Result<(R, Option<T::Gradients>)> {
        let found = self.ddp.find(&models)?;
        // Their gradients are in what `f` has, where this call cannot see them.
        if let Some(local) = found.0.iter().flat_map(|model| model.local()).find(|entry| entry.trainable) {
            let reason =
                format!("`scope` would leave out the gradient of the local parameter {}: use `backward`", local.path);
            return Err(intercept::refused(self.ddp, Error::invalid(reason)));
        }
        note_values(&found, &models);
        let call = Call { items: self.items, holds: false, counts_backwards: true };
        let prepare = |_: &mut R, _| models.prepare(&found, Own::Unknown);
        let (out, prepared) = intercept::run(self.ddp, found.0.clone(), call, f, prepare)?;
        Ok((out, gradients::<T>(&found, prepared)))
    }

    fn refuse_untracked<const D: usize>(&self, loss: &Tensor<D>) -> Result<()> {
        match loss.is_tracked() {
            true => Ok(()),
            false => Err(intercept::refused(
                self.ddp,
                Error::invalid(
                    "the loss depends on no parameter (a frozen model, or a loss computed from detached values)",
                ),
            )),
        }
    }
}

/// The gradients of a call that has reduced. Averages of parts that the call did not name are dropped.
fn gradients<T: Trained>(found: &Models, prepared: Option<Vec<Prepared>>) -> Option<T::Gradients> {
    let gradients = prepared.map(T::gradients);
    found.0.iter().for_each(|model| model.forget_averages());
    gradients
}

/// Notes the values of the models for the comparison of replicas, if the next reduction makes one.
fn note_values<T: Trained>(found: &Models, models: &T) {
    if found.0.iter().any(|model| model.compares()) {
        models.note_values();
    }
}
