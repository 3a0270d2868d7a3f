//! Check that an optimizer steps each element of a parameter alone, as sharded parameters need it.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_ddp_comm::RowDivision;

use super::ddp_optimizer::DdpOptimizer;
use crate::ddp::Ddp;
use crate::intercept::{ShardedParameter, refuse_parts_without_tap, sharded_parameters};
use crate::model::schema::unreadable;
use crate::tensor_conversion::data_of;
use crate::wrap::wrapped_in;
use crate::{Error, Result};

/// Sizes of the gradients. The largest has a norm near the largest whose square an f32 holds, so that it is clipped by
/// any limit that a gradient may exceed; the others find steps that depend on the size in another way.
const SIZES: [f32; 3] = [1e-2, 1e3, 1e17];
/// Share of the largest movement by which elements may differ.
const ROUNDING: f32 = 1e-4;
/// Steps at each size.
const STEPS: usize = 4;

impl Ddp {
    /// Returns `optim` if it can train the [sharded](crate::WrapConfig::with_sharding) parameters of `model`: the
    /// wrapped model, or the part of it that this optimizer steps. Call it after `wrap`, once for **every** optimizer,
    /// with the model that `step` will get, and step with what it returns; pass that in again to check it for another
    /// part. A backward with a gradient of a sharded parameter for which no optimizer was checked is an error, and so
    /// is one after another optimizer stepped the parameter. Not collective: it communicates nothing.
    ///
    /// A rank holds some rows of a sharded parameter, so its optimizer must step each element by itself, as SGD, Adam
    /// and AdamW do. For each sharded parameter this steps a copy of the optimizer on the rows of the first two ranks,
    /// together and apart, with gradients of several sizes, up to one that any limit of a norm clips: twelve steps, and
    /// for their time the memory of two ranks' rows with state. For a model without sharded parameters it does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] with the parameters whose elements depend on each other: under Muon, LAMB, Adafactor or
    /// Burn's clipping by norm; [`Error::Invalid`] too if the optimizer has made steps before.
    ///
    /// # Example
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, prelude::*};
    /// # use burn_ddp::prelude::*;
    /// use burn::grad_clipping::GradientClippingConfig;
    /// use burn::optim::AdamWConfig;
    ///
    /// Ddp::spawn(2, |ddp| {
    ///     let device = ddp.device()?.autodiff();
    ///     let config = WrapConfig::new().with_sharding(Sharding::Parameters);
    ///     let model = ddp.wrap_with(LinearConfig::new(256, 256).init(&device), &config)?;
    ///     assert!(ddp.optimizer(AdamWConfig::new().init(), &model).is_ok());
    ///     let clips = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
    ///     let refused = ddp.optimizer(clips.init(), &model).err().unwrap();
    ///     assert!(refused.to_string().contains("(weight)"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), burn_ddp::Error>(())
    /// ```
    pub fn optimizer<M: Module>(&self, optim: impl Into<DdpOptimizer>, model: &M) -> Result<DdpOptimizer> {
        let mut optim = optim.into();
        let wrapped = wrapped_in(self.group(), model)?;
        refuse_parts_without_tap(model)?;
        // Without the state of earlier steps, which has the shape of a part.
        let fresh = ModuleOptimizer::clone(&optim).load_record(OptimizerRecord::default());
        let (mut fits, mut refused) = (Vec::new(), Vec::new());
        let (sharded, device) = (sharded_parameters(model), device_of(model));
        for parameter in &sharded {
            let ShardedParameter { path, id, dims, trains, .. } = parameter;
            match mixes_elements(&fresh, path, *id, dims, self.world_size(), &device)? {
                false => fits.push(parameter),
                true if *trains => refused.push(path.as_str()),
                // No optimizer steps it as long as it is frozen.
                true => {}
            }
        }
        refuse_mixing(&refused)?;
        if !sharded.is_empty() && !optim.to_record().is_empty() {
            return Err(Error::invalid(
                "the optimizer has state of earlier steps, which does not belong to this rank's parts of the \
                 parameters: begin with a new optimizer",
            ));
        }
        if wrapped.iter().any(|wrapped| wrapped.has_divided()) {
            optim.fit(fits.into_iter().map(ShardedParameter::slot));
        }
        Ok(optim)
    }
}

/// Refuses an optimizer that [mixes elements](mixes_elements) of the parameters with these paths, if there are some.
pub(crate) fn refuse_mixing(paths: &[impl AsRef<str>]) -> Result<()> {
    if paths.is_empty() {
        return Ok(());
    }
    let paths: Vec<&str> = paths.iter().map(AsRef::as_ref).collect();
    Err(Error::invalid(format!(
        "the optimizer does not step each element by itself, as sharded parameters need it ({}): use SGD, Adam or \
        AdamW, and `clip_grad_norm` instead of the optimizer's clipping by norm",
        paths.join(", ")
    )))
}

/// The device, without autodiff, on which an optimizer steps `model`.
pub(crate) fn device_of<M: Module>(model: &M) -> Device {
    model.devices().into_iter().next().unwrap_or_default().without_autodiff()
}

/// True if an optimizer without state steps the rows that the first two of `world_size` ranks have of a parameter of
/// shape `dims`, on `device`, together in another way than apart. In a world of 1 the rows are divided between two.
pub(crate) fn mixes_elements(
    fresh: &ModuleOptimizer,
    path: &str,
    id: ParamId,
    dims: &[usize],
    world_size: usize,
    device: &Device,
) -> Result<bool> {
    let division = RowDivision { rows: dims[0], row_bytes: 1, world_size: world_size.max(2) };
    let rows = [0, 1].map(|rank| division.rows_of(rank).len());
    match dims.len() {
        2 => differs::<2>(fresh, path, id, rows, dims, device),
        3 => differs::<3>(fresh, path, id, rows, dims, device),
        4 => differs::<4>(fresh, path, id, rows, dims, device),
        5 => differs::<5>(fresh, path, id, rows, dims, device),
        6 => differs::<6>(fresh, path, id, rows, dims, device),
        7 => differs::<7>(fresh, path, id, rows, dims, device),
        _ => differs::<8>(fresh, path, id, rows, dims, device),
    }
}

/// True if steps of all `rows` differ from steps of those of each of two ranks, by more than kernels differ which
/// compute the last elements of a tensor in another way. In f32, whatever the device's default: in f16 the largest
/// gradients would be infinite, and both results NaN.
fn differs<const D: usize>(
    optim: &ModuleOptimizer,
    path: &str,
    id: ParamId,
    [first, second]: [usize; 2],
    whole: &[usize],
    device: &Device,
) -> Result<bool> {
    let mut dims = [1; D];
    dims.copy_from_slice(whole);
    dims[0] = first + second;
    let (rows, len) = (dims[0], dims.iter().product::<usize>());
    let floats = |ints: Tensor<1, Int>| -> Tensor<1> { ints.float().cast(DType::F32) };
    let ramp = |salt: f32, size: f32| -> Tensor<D> {
        let ramp = floats(Tensor::arange(0..len as i64, device));
        ((ramp * 0.37 + salt).sin() * size).reshape(dims)
    };
    let alternating = floats(Tensor::arange(0..len as i64, device).remainder_scalar(2));
    let steps = |range: std::ops::Range<usize>| -> Result<Vec<Vec<f32>>> {
        let mut after = vec![Vec::new(); SIZES.len() * STEPS];
        if range.is_empty() {
            return Ok(after);
        }
        // Every other element is 0, which the smallest step changes.
        let start = ramp(0.5, 1.0) * alternating.clone().reshape(dims);
        let start: Tensor<D> =
            Tensor::from_data(start.slice_dim(0, range.clone()).into_data(), (&device.clone().autodiff(), DType::F32));
        let mut probe = Probe { path: path.into(), param: Param::initialized(id, start.require_grad()) };
        let mut optim = optim.clone();
        // Row r grows with the step, so that norms of the halves do not keep their ratio.
        let growth = floats(Tensor::arange(0..rows as i64, device));
        let sizes = SIZES.into_iter().flat_map(|size| (0..STEPS).map(move |step| (step, size)));
        for ((step, size), after) in sizes.zip(&mut after) {
            let mut column = [1; D];
            column[0] = rows;
            let growth = growth.clone().mul_scalar(step as f32).add_scalar(1.0).reshape(column);
            let gradient = (ramp(1.0 + step as f32, size) * growth).slice_dim(0, range.clone());
            let mut gradients = GradientsParams::new();
            gradients.register(id, gradient);
            probe = optim.step(0.01, probe, gradients);
            *after = data_of(probe.param.val()).map_err(|e| unreadable(path, &e))?.iter::<f32>().collect();
        }
        Ok(after)
    };
    let (together, first, second) = (steps(0..rows)?, steps(0..first)?, steps(first..rows)?);
    let start = ramp(0.5, 1.0) * alternating.reshape(dims);
    let start: Vec<f32> = data_of(start).map_err(|e| unreadable(path, &e))?.iter().collect();
    // Step by step: the largest gradients may end in NaN, together and apart.
    Ok(together.iter().zip(first.iter().zip(&second)).any(|(together, (first, second))| {
        let apart = first.iter().chain(second);
        let moves = together.iter().chain(apart.clone()).zip(start.iter().chain(&start));
        let most = moves.map(|(end, start)| (end - start).abs()).fold(0.0, f32::max);
        let is_near = |a: &f32, b: &f32| a.to_bits() == b.to_bits() || (a - b).abs() <= ROUNDING * most;
        !together.iter().zip(apart).all(|(a, b)| is_near(a, b))
    }))
}

/// A module of one parameter, which it shows at the path of another, since optimizers have groups by path.
#[derive(Clone, Debug)]
struct Probe<const D: usize> {
    path: String,
    param: Param<Tensor<D>>,
}

impl<const D: usize> Module for Probe<D> {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.param.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Probe { param: self.param.fork(device), ..self }
    }

    fn to_device(self, device: &Device) -> Self {
        Probe { param: self.param.to_device(device), ..self }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module(&self.path, "Probe");
        self.param.visit(visitor);
        visitor.exit_module(&self.path, "Probe");
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let Probe { path, param } = self;
        mapper.enter_module(&path, "Probe");
        let param = Module::map(param, mapper);
        mapper.exit_module(&path, "Probe");
        Probe { path, param }
    }

    fn valid(&self) -> Self {
        Probe { path: self.path.clone(), param: self.param.valid() }
    }

    fn train(self) -> Self {
        Probe { param: Module::train(self.param), ..self }
    }

    fn materialize(self) -> Self {
        self
    }
}
