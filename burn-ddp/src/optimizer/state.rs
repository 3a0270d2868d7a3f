//! The state of an optimizer, carried from one process to another.
//!
//! Burn keys it by parameter id, and ids are random in each process. What two processes share is the path of a
//! parameter in the model: a state travels under the ids of the process that wrote it, together with the path of each
//! id.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bytes, DType as BurnDType, Device, Tensor};
use burn_ddp_comm::ProcessGroup;

use crate::model::burnpack_header::{self, Item};
use crate::model::burnpack_tensors::{self, StoredTensor};
use crate::model::schema::Schema;
use crate::{Error, Result, agreement, chunked_broadcast, intercept};

/// Name of the work in errors of ranks that take another one's state.
const TAKE: &str = "take the optimizer's state";

/// The path and the id of each parameter of a model, in traversal order. Clones of a parameter have its id.
pub(crate) type Ids = Vec<(String, u64)>;

/// Name under which Burn writes the number of dimensions of each parameter.
const DIMENSIONS: &str = "__rank";
/// Tensors that Burn 0.22 loads from one file (`burn_pack::MAX_TENSOR_COUNT`).
const MOST_TENSORS: usize = 100_000;
/// Parameters whose state is checked at once.
const CHECKED_TOGETHER: usize = 1000;
/// Names of the floating-point types in a record.
const FLOATS: [&str; 5] = ["F64", "F32", "Flex32", "F16", "BF16"];

fn ids(schema: &Schema) -> Ids {
    schema.entries.iter().zip(&schema.ids).map(|(entry, id)| (entry.path.clone(), id.val())).collect()
}

/// Paths and ids of the parameters and buffers of `model`.
pub(crate) fn ids_of<M: Module>(model: &M) -> Result<Ids> {
    Ok(ids(&intercept::bypass(|| Schema::of(model))?))
}

/// The state as plain Burn writes it. Needs host memory for two copies: Burn's record, and the bytes.
pub(crate) fn write(optim: &ModuleOptimizer) -> Result<Vec<u8>> {
    let bytes = optim.into_bytes().map_err(|e| Error::invalid(format!("the optimizer's state: {e}")))?;
    Ok(bytes.try_into_vec().unwrap_or_else(|bytes| bytes.to_vec()))
}

/// The header of a state, with the ids `mine` of this model in place of `theirs`, those of the model that wrote it.
///
/// # Errors
///
/// [`Error::Invalid`] if the state belongs to parameters that the model does not have, or to another optimizer than
/// `optim`.
pub(crate) fn renamed(optim: &ModuleOptimizer, mut header: Item, theirs: &Ids, mine: &Ids) -> Result<Item> {
    let checked = rename(&mut header, theirs, mine).and_then(|()| check_fields(optim, &header, mine));
    checked.map_err(unusable)?;
    leave_out_stateless(&mut header);
    Ok(header)
}

/// Leaves out parameters of which the state says no more than the number of dimensions, as that of an SGD without
/// momentum. The next step makes it anew, and Burn 0.22 loads it in a time that grows with the square of their number.
fn leave_out_stateless(header: &mut Item) {
    let has_state =
        |(name, _): &(Item, Item)| split(name.text()?).filter(|(_, of)| *of != DIMENSIONS).map(|(id, _)| id);
    let values = header.entries("tensors").iter().chain(header.entries("scalars"));
    let with_state: HashSet<u64> = values.filter_map(has_state).collect();
    let Item::Map(sections) = header else { return };
    for (section, entries) in sections {
        if let (Some("scalars"), Item::Map(entries)) = (section.text(), entries) {
            let is_of = |name: &Item| name.text().and_then(split).is_some_and(|(id, _)| with_state.contains(&id));
            entries.retain(|(name, _)| is_of(name));
        }
    }
}

/// `optim` with the state in `bytes`, whose header is [`renamed`].
///
/// # Errors
///
/// [`Error::Invalid`] if Burn cannot read them.
pub(crate) fn read(optim: ModuleOptimizer, bytes: Vec<u8>) -> Result<ModuleOptimizer> {
    optim.from_bytes(Bytes::from_bytes_vec(bytes)).map_err(|e| unusable(e.to_string()))
}

fn unusable(reason: String) -> Error {
    Error::invalid(format!("the optimizer's state cannot be loaded: {reason}"))
}

/// Checks that `optim` takes all fields of a state unchanged: Burn leaves out those that the optimizer does not keep,
/// and converts to the device's default dtype. The check loads states of the same fields, of one element each, and of
/// few parameters, since Burn 0.22 loads some optimizers' state in a time that grows with the square of their number.
fn check_fields(optim: &ModuleOptimizer, header: &Item, ids: &Ids) -> std::result::Result<(), String> {
    let Item::Map(sections) = header else { return Err("its header is no map".into()) };
    type Sections<'a> = BTreeMap<&'a str, Vec<(Item, Item)>>;
    let mut parts: BTreeMap<usize, Sections<'_>> = BTreeMap::new();
    let mut part_of: HashMap<u64, usize> = HashMap::new();
    for (section, entries) in sections {
        let (Some(section), Item::Map(entries)) = (section.text(), entries) else { continue };
        for (name, value) in entries {
            let (id, _) = name.text().and_then(split).ok_or("it is not the state of an optimizer")?;
            let next = part_of.len() / CHECKED_TOGETHER;
            let part = parts.entry(*part_of.entry(id).or_insert(next)).or_default();
            part.entry(section).or_default().push((name.clone(), value.clone()));
        }
    }
    // Without the state that `optim` has, which would be copied each time.
    let nothing = burnpack_header::header_bytes(&burnpack_tensors::header(&[], &[])?)?;
    let blank = optim.clone().from_bytes(Bytes::from_bytes_vec(nothing)).map_err(|e| e.to_string())?;
    parts.into_values().try_for_each(|sections| {
        let section = |(name, entries): (&str, _)| (Item::Text(name.into()), Item::Map(entries));
        check_fields_together(&blank, &Item::Map(sections.into_iter().map(section).collect()), ids)
    })
}

fn check_fields_together(optim: &ModuleOptimizer, header: &Item, ids: &Ids) -> std::result::Result<(), String> {
    let small = |(tensor, _): (StoredTensor, _)| {
        let (dims, len_bytes) = (vec![1; tensor.dims.len()], tensor.dtype.size());
        StoredTensor { dims, len_bytes, ..tensor }
    };
    let tensors: Vec<StoredTensor> = burnpack_tensors::tensors(header)?.into_iter().map(small).collect();
    let small = burnpack_tensors::header(&tensors, &burnpack_tensors::others(header))?;
    let mut bytes = burnpack_header::header_bytes(&small)?;
    let data = tensors.iter().fold(0, |end, tensor| burnpack_tensors::aligned(end) + tensor.len_bytes);
    bytes.resize(bytes.len() + data, 0);
    let loaded = optim.clone().from_bytes(Bytes::from_bytes_vec(bytes)).map_err(|e| e.to_string())?;
    let kept = write(&loaded).map_err(|e| e.to_string())?;
    let (kept, _) = burnpack_header::read_header(&mut kept.as_slice())?;
    first_change(header, &kept, ids).map_or(Ok(()), Err)
}

/// Logs that the state passes through another device: Burn 0.22 loads it on its default device, and moves it to that of
/// the parameters in the next step.
///
/// This crate cannot avoid it. `ModuleOptimizer::load_record` takes no device and begins with `Device::default()`
/// (`burn-optim-0.22.1/src/optim/module/module_optimizer.rs:248`); the states are private, and only a step moves them
/// (line 471). `DispatchDevice::default()` (`burn-dispatch-0.22.1/src/device.rs:249`) is the first device of a kind,
/// has no setter, and reads a kind without a number from `BURN_DEVICE`, which a process with threads cannot set safely.
pub(crate) fn warn_of_detour<M: Module>(model: &M, len_bytes: usize) {
    let (default, mib) = (Device::default(), len_bytes >> 20);
    if let Some(own) = model.devices().into_iter().find(|device| *device != default) {
        tracing::warn!(
            "the optimizer's state ({mib} MiB) is on {default:?} until the next step, then on {own:?}: if {default:?} \
             has no room for it, let each rank see only its own GPU (CUDA_VISIBLE_DEVICES)"
        );
    }
}

/// Checks that a state can be loaded again: it belongs to parameters in `ids`, is not too large, and Burn rounds
/// nothing.
///
/// # Errors
///
/// [`Error::Invalid`] with the parameter and the reason.
pub(crate) fn check(header: &Item, ids: &Ids) -> Result<()> {
    let checked = rename(&mut header.clone(), ids, ids).and_then(|()| {
        let count = header.entries("tensors").len();
        if count > MOST_TENSORS {
            return Err(format!("it has {count} tensors, and Burn loads at most {MOST_TENSORS}"));
        }
        let default = format!("{:?}", BurnDType::from(Device::default().settings().float_dtype));
        let dtype = |tensor: &'_ Item| tensor.get("dtype").and_then(Item::text).map(str::to_string);
        let is_other = |dtype: &str| FLOATS.contains(&dtype) && dtype != default;
        match header.entries("tensors").iter().find_map(|(name, t)| Some((name, dtype(t).filter(|d| is_other(d))?))) {
            Some((name, dtype)) => Err(rounded(&spoken(name, ids), &dtype, &default)),
            None => Ok(()),
        }
    });
    checked.map_err(|reason| Error::invalid(format!("the optimizer's state cannot be saved: {reason}")))
}

/// Why Burn 0.22 cannot load a tensor of a state: its loader takes neither a device nor a dtype.
fn rounded(what: &str, dtype: &str, default: &str) -> String {
    format!(
        "{what} is {dtype}, but Burn loads it in the default dtype of its default device, which is {default}: if all \
         parameters are {dtype}, set that with `Device::configure`; state of several dtypes cannot be loaded"
    )
}

/// A field of a parameter's state in words, from its name in a record.
fn spoken(name: &Item, ids: &Ids) -> String {
    let (id, field) = name.text().and_then(split).unwrap_or_default();
    let path = ids.iter().find(|(_, known)| *known == id).map_or("?", |(path, _)| path);
    format!("{field} of {path}")
}

/// Gives every rank the state of `root`'s optimizer, under its own parameter ids. *Collective* over `group`.
///
/// # Errors
///
/// On every rank, which keeps the state that it had: [`Error::ModelsDiffer`]; [`Error::Invalid`] if the ranks have
/// different optimizers, or a state cannot be written or read.
#[track_caller]
pub(crate) fn broadcast<M: Module>(
    group: &ProcessGroup,
    optim: &mut ModuleOptimizer,
    model: &M,
    root: usize,
) -> Result<()> {
    broadcast_to(true, group, optim, model, root)
}

/// [`broadcast`] to the ranks that pass `true`; the others keep the state that they have.
///
/// # Errors
///
/// As [`broadcast`].
#[track_caller]
pub(crate) fn broadcast_to<M: Module>(
    takes: bool,
    group: &ProcessGroup,
    optim: &mut ModuleOptimizer,
    model: &M,
    root: usize,
) -> Result<()> {
    let has_parts = "each rank has the state of its rows; leave the call out, and resume by `checkpoint.optimizer`, \
        which gives each rank its rows of a saved state";
    intercept::refuse_sharded(model, "broadcasting the optimizer's state", has_parts)?;
    let mine = intercept::bypass(|| Schema::of(model)).and_then(|schema| {
        let state = if group.rank() == root { write(optim)? } else { Vec::new() };
        Ok((schema, state, fields(optim, model)?))
    });
    let (schema, mut state, fields) = agreement::on_outcome(group, "share the optimizer's state", mine)?;
    agreement::on_model(group, &schema.entries)?;
    let all = group.all_gather_object(&fields)?;
    if let Some((rank, other)) = group.ranks().iter().zip(&all).find(|(_, fields)| **fields != all[0]) {
        return Err(Error::invalid(format!(
            "the ranks have different optimizers: rank {}'s keeps {} for each parameter, rank {rank}'s {}",
            group.ranks()[0],
            listed(&all[0]),
            listed(other)
        )));
    }
    let mine = ids(&schema);
    let start = burnpack_header::read_header(&mut state.as_slice()).map_or(0, |(_, start)| start);
    let (header, data_bytes) = (state[..start].to_vec(), state.len() - start);
    let (theirs, header, data_bytes) = group.broadcast_object(Some((mine.clone(), header, data_bytes)), root)?;
    if group.rank() == root {
        agreement::on_outcome(group, TAKE, Ok(()))?;
        chunked_broadcast::send(group, &state[start..])?;
        agreement::on_outcome(group, TAKE, Ok(()))?;
        return Ok(());
    }
    let header = burnpack_header::read_header(&mut header.as_slice()).map_err(unusable);
    let header = header.and_then(|(header, _)| match takes {
        true => burnpack_header::header_bytes(&renamed(optim, header, &theirs, &mine)?).map_err(unusable),
        false => Ok(Vec::new()),
    });
    // The data follow the header in one buffer, so that they are in memory once.
    state = agreement::on_outcome(group, TAKE, header)?;
    let start = state.len();
    state.resize(start + data_bytes, 0);
    chunked_broadcast::receive_into(group, &mut state[start..], root)?;
    let loaded = if takes {
        warn_of_detour(model, data_bytes);
        read(optim.clone(), state)
    } else {
        Ok(optim.clone())
    };
    *optim = agreement::on_outcome(group, TAKE, loaded)?;
    Ok(())
}

/// Names of the values that the optimizer keeps for each parameter, found by a step of a copy on a parameter of its
/// own.
fn fields<M: Module>(optim: &ModuleOptimizer, model: &M) -> Result<BTreeSet<String>> {
    let device = model.devices().into_iter().next().unwrap_or_default().without_autodiff();
    let param = Param::from_tensor(Tensor::<2>::ones([2, 2], &device.clone().autodiff()).require_grad());
    let (id, mut optim, mut gradients) = (param.id, optim.clone(), GradientsParams::new());
    gradients.register(id, Tensor::<2>::ones([2, 2], &device));
    drop(optim.step(0.0, param, gradients));
    let bytes = write(&optim)?;
    let (header, _) = burnpack_header::read_header(&mut bytes.as_slice()).map_err(Error::invalid)?;
    let of_id = |(name, _): &(Item, Item)| Some(split(name.text()?).filter(|(of, _)| *of == id.val())?.1.to_string());
    let names = header.entries("tensors").iter().chain(header.entries("scalars")).filter_map(of_id);
    Ok(names.filter(|name| name != DIMENSIONS).collect())
}

fn listed(fields: &BTreeSet<String>) -> String {
    match fields.len() {
        0 => "nothing".into(),
        _ => fields.iter().map(String::as_str).collect::<Vec<_>>().join(", "),
    }
}

/// The id and the field of a name in an optimizer's record: `<id>.<field>`, or `<id>` alone.
pub(crate) fn split(name: &str) -> Option<(u64, &str)> {
    let (id, field) = name.split_once('.').unwrap_or((name, ""));
    Some((id.parse().ok()?, field))
}

/// Replaces ids of `theirs` in the header by those of `mine` at the same paths.
fn rename(header: &mut Item, theirs: &Ids, mine: &Ids) -> std::result::Result<(), String> {
    let path_of: BTreeMap<&str, u64> = mine.iter().map(|(path, id)| (path.as_str(), *id)).collect();
    let mut mine_of: HashMap<u64, (u64, &str)> = HashMap::new();
    for (path, id) in theirs {
        let Some(&here) = path_of.get(path.as_str()) else { continue };
        let (known, first) = *mine_of.entry(*id).or_insert((here, path));
        if known != here {
            return Err(format!("{first} and {path} were one parameter (tied) where it was written, and are two here"));
        }
    }
    let mut owners: HashMap<u64, u64> = HashMap::new();
    let mut rename = |id: u64| -> std::result::Result<u64, String> {
        let Some(&(here, path)) = mine_of.get(&id) else {
            return Err(match theirs.iter().find(|(_, known)| *known == id) {
                Some((path, _)) => format!("it has state of {path}, which the model does not have"),
                None => "it has state of a parameter that is not in the model it was saved with: was another model \
                         trained, or a record loaded after the optimizer had stepped?"
                    .into(),
            });
        };
        match *owners.entry(here).or_insert(id) {
            owner if owner == id => Ok(here),
            _ => Err(format!("{path} is tied to another parameter here, but was not where the state was written")),
        }
    };
    let Item::Map(sections) = header else { return Err("its header is no map".into()) };
    for entries in sections.iter_mut().filter_map(|(_, section)| match section {
        Item::Map(entries) => Some(entries),
        _ => None,
    }) {
        for (name, value) in entries {
            let (id, field) = name.text().and_then(split).ok_or("it is not the state of an optimizer")?;
            let id = rename(id)?;
            *name = Item::Text(if field.is_empty() { id.to_string() } else { format!("{id}.{field}") });
            if let Item::Map(descriptor) = value {
                descriptor
                    .iter_mut()
                    .filter(|(key, _)| key.text() == Some("param_id"))
                    .for_each(|(_, v)| *v = Item::Uint(id));
            }
        }
    }
    Ok(())
}

/// First difference between the record that was loaded and the record of the optimizer that loaded it.
fn first_change(loaded: &Item, kept: &Item, ids: &Ids) -> Option<String> {
    for section in ["tensors", "scalars"] {
        let kept: HashMap<&str, &Item> =
            kept.entries(section).iter().filter_map(|(name, value)| Some((name.text()?, value))).collect();
        for (name, was) in loaded.entries(section) {
            let Some(is) = name.text().and_then(|name| kept.get(name)) else {
                let what = spoken(name, ids);
                return Some(format!("it has {what}, which this optimizer does not keep: is it of another optimizer?"));
            };
            if was.get("dtype") != is.get("dtype") {
                let dtype = |item: &'_ Item| item.get("dtype").and_then(Item::text).unwrap_or("unknown").to_string();
                return Some(rounded(&spoken(name, ids), &dtype(was), &dtype(is)));
            }
        }
        if kept.len() > loaded.entries(section).len() {
            return Some("it lacks values that this optimizer keeps: is it of another optimizer?".into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Collectives;
    use crate::ddp::Ddp;
    use crate::model::burnpack_header::Pack;
    use crate::param_hash;
    use burn::module::{Lora, ModuleVisitor};
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::decay::WeightDecayConfig;
    use burn::optim::momentum::MomentumConfig;
    use burn::optim::*;
    use burn::tensor::FloatDType;

    #[derive(burn::module::Module, Debug)]
    struct Two {
        a: Linear,
        b: Linear,
    }

    impl Two {
        fn new(device: &Device) -> Self {
            let init = || LinearConfig::new(3, 3).init(device);
            Two { a: init(), b: init() }
        }
    }

    /// Gradients that differ between parameters and steps.
    fn gradients<M: Module>(model: &M, step: usize) -> GradientsParams {
        struct Make(GradientsParams, f32);
        impl ModuleVisitor for Make {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if !param.is_require_grad() {
                    return;
                }
                let like = param.base().inner();
                self.1 += 0.3;
                let n = like.shape().num_elements() as i64;
                let ramp = Tensor::<1, burn::tensor::Int>::arange(0..n, &like.device()).float();
                let values = (ramp + self.1).sin().cast(like.dtype()).reshape(like.dims());
                self.0.register(param.id, values);
            }
        }
        let mut make = Make(GradientsParams::new(), step as f32);
        model.visit(&mut make);
        make.0
    }

    fn train<M: Module>(optim: &mut ModuleOptimizer, mut model: M, steps: std::ops::Range<usize>) -> M {
        for step in steps {
            let gradients = gradients(&model, step);
            model = optim.step(0.01, model, gradients);
        }
        model
    }

    /// Every tensor of the state by path and field.
    fn values<M: Module>(optim: &ModuleOptimizer, model: &M) -> BTreeMap<String, Vec<u8>> {
        let bytes = write(optim).unwrap();
        let ids = ids(&Schema::of(model).unwrap());
        let pack = Pack::read(&bytes).unwrap();
        let value = |(name, descriptor): &(Item, Item)| {
            let (id, field) = split(name.text().unwrap()).unwrap();
            let path = &ids.iter().find(|(_, known)| *known == id).unwrap().0;
            let Some(Item::Array(range)) = descriptor.get("data_offsets") else { panic!("{descriptor:?}") };
            let [Item::Uint(start), Item::Uint(end)] = range[..] else { panic!("{range:?}") };
            (format!("{path} {field}"), pack.data()[start as usize..end as usize].to_vec())
        };
        pack.header.entries("tensors").iter().map(value).collect()
    }

    fn header(optim: &ModuleOptimizer) -> Item {
        burnpack_header::read_header(&mut write(optim).unwrap().as_slice()).unwrap().0
    }

    fn device() -> Device {
        Device::flex().autodiff()
    }

    fn optimizers() -> Vec<(&'static str, ModuleOptimizer)> {
        let sgd = SgdConfig::new();
        vec![
            ("sgd", sgd.clone().init()),
            ("momentum", sgd.with_momentum(Some(MomentumConfig::new())).init()),
            ("adam", AdamConfig::new().init()),
            ("amsgrad", AdamConfig::new().with_amsgrad(true).init()),
            ("adamw", AdamWConfig::new().init()),
            ("adagrad", AdaGradConfig::new().init()),
            ("adafactor", AdafactorConfig::new().init()),
            ("adan", AdanConfig::new().init()),
            ("lamb", LambConfig::new().init()),
            ("lion", LionConfig::new().init()),
            ("rmsprop", RmsPropConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.1))).init()),
        ]
    }

    #[test]
    fn every_optimizer_goes_on_as_the_roots_bit_by_bit() {
        for (name, optim) in optimizers() {
            for root in [0, 2] {
                let ranks = Ddp::spawn(3, |ddp| {
                    let (mut optim, mut model) = (optim.clone(), Two::new(&device()));
                    // Ranks other than the root have done other steps, or none.
                    let steps = if ddp.rank() == root { 0..3 } else { 5..5 + ddp.rank() };
                    model = train(&mut optim, model, steps);
                    model = ddp.broadcast_parameters(model, root)?;
                    broadcast(ddp.group(), &mut optim, &model, root)?;
                    let state = values(&optim, &model);
                    model = train(&mut optim, model, 20..23);
                    Ok((state, values(&optim, &model), param_hash(&model)?))
                })
                .unwrap_or_else(|e| panic!("{name}: {e}"));
                assert!(ranks[0] == ranks[1] && ranks[0] == ranks[2], "{name} from {root}");
                assert_eq!(ranks[0].0.is_empty(), name == "sgd");
            }
        }
    }

    #[test]
    fn ranks_that_take_no_state_load_none() {
        let ranks = Ddp::spawn(3, |ddp| {
            let mut optim = AdamConfig::new().init();
            let model = train(&mut optim, Two::new(&device()), 0..1 + ddp.rank());
            let before = values(&optim, &model);
            broadcast_to(ddp.rank() != 1, ddp.group(), &mut optim, &model, 0)?;
            Ok((before, values(&optim, &model)))
        })
        .unwrap();
        let [(root, _), (own, kept), (_, taken)] = ranks.try_into().unwrap_or_else(|_| panic!("three ranks"));
        assert!(own == kept && root == taken && root != own);
    }

    #[test]
    fn before_the_first_step_there_is_nothing_and_all_have_that() {
        let ranks = Ddp::spawn(2, |ddp| {
            let (mut optim, model) = (AdamConfig::new().init(), Two::new(&device()));
            let model = train(&mut optim, model, 0..ddp.rank());
            broadcast(ddp.group(), &mut optim, &model, 0)?;
            Ok(optim.to_record().len())
        });
        assert_eq!(ranks.unwrap(), [0, 0]);
    }

    #[test]
    fn different_optimizers_or_models_are_an_error_on_every_rank_and_change_nothing() {
        let ranks = Ddp::spawn(3, |ddp| {
            let mut optim = if ddp.rank() == 1 {
                SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
            } else {
                AdamConfig::new().init()
            };
            let model = train(&mut optim, Two::new(&device()), 0..2);
            let before = values(&optim, &model);
            let error = broadcast(ddp.group(), &mut optim, &model, 0).unwrap_err();
            assert_eq!(values(&optim, &model), before);
            let rows = 3 + ddp.rank() / 2;
            let other = LinearConfig::new(rows, 3).init(&device());
            let mut adam = AdamConfig::new().init();
            let models = broadcast(ddp.group(), &mut adam, &other, 0).unwrap_err();
            Ok((error.to_string(), models.to_string()))
        })
        .unwrap();
        for (optimizers, models) in ranks {
            assert!(optimizers.contains("rank 0's keeps momentum.moment_1, momentum.moment_2"), "{optimizers}");
            assert!(
                optimizers.contains("rank 1's velocity") || optimizers.contains("rank 1's momentum.velocity"),
                "{optimizers}"
            );
            assert!(models.contains("weight is [3, 3] f32 on rank 0, but [4, 3] f32 on rank 2"), "{models}");
        }
    }

    #[test]
    fn lora_and_tied_parameters_find_their_state() {
        let ranks = Ddp::spawn(2, |ddp| {
            let mut model = Two::new(&device());
            model.b = model.a.clone();
            let mut optim = AdamConfig::new().init();
            model = train(&mut optim, model, 0..2 * (1 - ddp.rank()));
            broadcast(ddp.group(), &mut optim, &model, 0)?;
            let tied = values(&optim, &model);
            let model = Two::new(&device()).apply_lora(Lora::new(2, 4.0));
            let mut optim = AdamConfig::new().init();
            let model = train(&mut optim, model, 0..2 * (1 - ddp.rank()));
            broadcast(ddp.group(), &mut optim, &model, 0)?;
            Ok((tied, values(&optim, &model)))
        })
        .unwrap();
        assert_eq!(ranks[0], ranks[1]);
        let (tied, lora) = &ranks[0];
        assert!(tied.keys().any(|k| k.starts_with("a.weight")) && !tied.keys().any(|k| k.starts_with("b.")));
        assert!(lora.keys().any(|k| k.starts_with("a.weight.lora")), "{:?}", lora.keys());
    }

    #[test]
    fn a_state_for_another_model_or_optimizer_is_refused() {
        let mut optim = AdamConfig::new().init();
        let model = train(&mut optim, Two::new(&device()), 0..1);
        let (header, theirs) = (header(&optim), ids(&Schema::of(&model).unwrap()));
        let load = |optim: ModuleOptimizer, theirs: &Ids, mine: &Ids| {
            renamed(&optim, header.clone(), theirs, mine).err().unwrap().to_string()
        };
        let without_b = theirs[..2].to_vec();
        let e = load(AdamConfig::new().init(), &theirs, &without_b);
        assert!(e.contains("state of b.") && e.contains("which the model does not have"), "{e}");
        let e = load(AdamConfig::new().init(), &without_b, &theirs);
        assert!(e.contains("not in the model it was saved with"), "{e}");
        let e = load(SgdConfig::new().init(), &theirs, &theirs);
        assert!(e.contains("another optimizer?"), "{e}");
        let tied: Ids = theirs.iter().map(|(path, _)| (path.clone(), theirs[0].1)).collect();
        let e = load(AdamConfig::new().init(), &theirs, &tied);
        assert!(e.contains("is tied to another parameter here"), "{e}");
        let e = load(AdamConfig::new().init(), &tied, &theirs);
        assert!(e.contains("were one parameter (tied) where it was written"), "{e}");
    }

    #[test]
    fn a_state_that_burn_would_round_is_refused() {
        let weight = Tensor::<2>::ones([2, 2], (&device(), BurnDType::F64)).require_grad();
        let model = Linear { weight: Param::from_tensor(weight), bias: None };
        let mut optim = AdamConfig::new().init();
        let model = train(&mut optim, model, 0..1);
        let (ids, header) = (ids(&Schema::of(&model).unwrap()), header(&optim));
        let (saved, loaded) = (check(&header, &ids), renamed(&AdamConfig::new().init(), header, &ids, &ids));
        // A test that trains in f64 may have made it the default of this process.
        match Device::flex().settings().float_dtype {
            FloatDType::F64 => drop((saved.unwrap(), loaded.unwrap())),
            _ => {
                let (saved, loaded) = (saved.unwrap_err().to_string(), loaded.err().unwrap().to_string());
                assert!(saved.contains("cannot be saved: momentum.moment_1 of weight is F64"), "{saved}");
                assert!(loaded.contains("cannot be loaded") && loaded.contains("`Device::configure`"), "{loaded}");
            }
        }
    }

    #[test]
    fn a_state_of_two_dtypes_is_refused_when_it_is_saved() {
        let float = |dtype| Tensor::<2>::ones([2, 2], (&device(), dtype)).require_grad();
        let linear = |dtype| Linear { weight: Param::from_tensor(float(dtype)), bias: None };
        let model = Two { a: linear(BurnDType::F32), b: linear(BurnDType::F64) };
        let mut optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        let model = train(&mut optim, model, 0..1);
        let refused = check(&header(&optim), &ids(&Schema::of(&model).unwrap())).unwrap_err().to_string();
        assert!(refused.contains(".weight is F") && refused.contains("several dtypes cannot be loaded"), "{refused}");
    }
}
