//! Burn's `Learner` with sharded parameters: model and optimizer are in parts while it trains, whole in checkpoints.
//!
//! A `Learner` gives no access to its optimizer, and takes values for its model by `load_model` alone, which compares
//! shapes and then calls each parameter's load mapper (`burn-core-0.22.1/src/store/mod.rs:342`,
//! `burn-core-0.22.1/src/module/param/base.rs:656`). So [`new`] gives mappers to the parameters that will be divided,
//! and checks the optimizer. When the strategy enables them, the mappers cut a loaded value to this rank's rows, and
//! replace a part that is saved by the whole value. Burn loads a checkpoint before the strategy begins, when the model
//! is still whole.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{ModuleMapper, Param};
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Tensor, TensorData};
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, LearningCheckpointer};
use burn_ddp_comm::RowDivision;

use crate::file_failure::FileWork;
use crate::intercept::{answers, is_bypassed, own_rows, parts};
use crate::model::burnpack_header::{Pack, header_bytes};
use crate::model::burnpack_tensors::{aligned, header, others, tensors};
use crate::model::burnpack_writer::Sink;
use crate::model::param_hash::param_hash;
use crate::model::values::values;
use crate::optimizer::element_wise::{device_of, mixes_elements, refuse_mixing};
use crate::optimizer::sharded_state::StateInParts;
use crate::optimizer::state::{ids_of, split};
use crate::{Ddp, Error, Result, WrapConfig, agreement, wrap};

/// Shape of each divided parameter, and the rows of this rank, by path.
pub(super) type Divided = HashMap<String, (Vec<usize>, Range<usize>)>;

/// Why a value of the learner's model may be this rank's part.
const NO_TAP: &str = "has no tap: the training ended with an error before its first step";

/// The present work of the mappers of divided parameters, for each thread.
enum Exchange {
    /// Keep values as they are; saving a part is an error.
    Wholes,
    /// Keep values as they are, also parts.
    Parts,
    /// Cut loaded values of these parameters to this rank's rows, and note their paths.
    Cut(Divided, HashSet<String>),
    /// Save these whole values in place of parts.
    Save(HashMap<String, TensorData>),
}

thread_local! {
    static EXCHANGE: RefCell<Exchange> = const { RefCell::new(Exchange::Wholes) };
}

/// Runs `f` while the mappers of this thread do `exchange`. Returns the result, and `exchange` with the noted paths.
fn with<T>(exchange: Exchange, f: impl FnOnce() -> T) -> (T, Exchange) {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            EXCHANGE.set(Exchange::Wholes);
        }
    }
    let _restore = Restore;
    EXCHANGE.set(exchange);
    let out = f();
    (out, EXCHANGE.replace(Exchange::Wholes))
}

/// A learner whose parameters can be divided by `config`. Not collective.
///
/// # Errors
///
/// Those of `wrap_with` that a rank sees alone; [`Error::Invalid`] with the parameters that `optim` does not step
/// element by element.
pub(super) fn new<M: LearnerModel>(
    ddp: &Ddp,
    model: M,
    optim: ModuleOptimizer,
    lr_scheduler: ModuleLrScheduler,
    config: &WrapConfig,
) -> Result<Learner<M>> {
    let divided = wrap::parameters_to_divide(ddp, &model, config)?;
    let (fresh, device) = (optim.clone().load_record(OptimizerRecord::default()), device_of(&model));
    let mut refused = Vec::new();
    for parameter in divided.iter().filter(|parameter| parameter.trains) {
        if mixes_elements(&fresh, &parameter.path, parameter.id, &parameter.dims, ddp.world_size(), &device)? {
            refused.push(&parameter.path);
        }
    }
    refuse_mixing(&refused)?;
    let parts = divided.iter().map(|parameter| {
        let division = RowDivision { rows: parameter.dims[0], row_bytes: 0, world_size: ddp.world_size() };
        let mut part = parameter.dims.clone();
        part[0] = division.rows_of(ddp.rank()).len();
        (parameter.path.clone(), (part != parameter.dims).then_some(part))
    });
    Ok(Learner::new(model.map(&mut Attach { parts: parts.collect(), path: Vec::new() }), optim, lr_scheduler))
}

/// Gives the mappers to divided parameters.
struct Attach {
    /// By path, the shape of this rank's part; `None` if that is the whole.
    parts: HashMap<String, Option<Vec<usize>>>,
    path: Vec<String>,
}

impl ModuleMapper for Attach {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let Some(part) = self.parts.get(&path).cloned() else { return param };
        let (id, value, mapper) = param.consume();
        let (loading, saving, loaded) = (mapper.clone(), mapper.clone(), path.clone());
        Param::from_mapped_value(id, value, mapper)
            .load_mapper(move |value| cut_to_own(&loaded, loading.on_load(value)))
            .save_mapper(move |value| {
                let is_part = part.as_deref().is_some_and(|part| value.dims()[..] == *part);
                match answers(&saving, is_part.then_some(NO_TAP)) {
                    true => value,
                    false => saving.on_save(made_whole(&path, is_part, value)),
                }
            })
    }
}

fn cut_to_own<const D: usize>(path: &str, value: Tensor<D>) -> Tensor<D> {
    EXCHANGE.with_borrow_mut(|exchange| {
        let Exchange::Cut(divided, cut) = exchange else { return value };
        match divided.get(path) {
            Some((dims, own)) if value.dims()[..] == dims[..] => {
                cut.insert(path.to_owned());
                if own.len() == dims[0] { value } else { own_rows(value, own.clone()) }
            }
            _ => value,
        }
    })
}

fn made_whole<const D: usize>(path: &str, is_part: bool, value: Tensor<D>) -> Tensor<D> {
    EXCHANGE.with_borrow(|exchange| match exchange {
        Exchange::Save(wholes) => match wholes.get(path) {
            Some(whole) => Tensor::from_data(whole.clone(), (&value.device(), value.dtype())),
            None => value,
        },
        Exchange::Wholes => {
            assert!(
                !is_part || is_bypassed(),
                "{path} is sharded, and a record would hold a part of it: use the trainer's checkpoints, or \
                `ddp.save(&result.model, path)` after the training"
            );
            value
        }
        Exchange::Parts | Exchange::Cut(..) => value,
    })
}

/// Loads `record` into the model, and cuts `divided` parameters and their optimizer state to this rank's rows.
///
/// # Errors
///
/// [`Error::Invalid`] if [`new`] did not make the learner, or the state is not that of the parameters.
pub(super) fn cut<M: LearnerModel>(
    learner: &mut Learner<M>,
    record: ModuleRecord,
    divided: Divided,
    events: &EventStoreClient,
) -> Result<()> {
    let mut missing: Vec<String> = divided.keys().cloned().collect();
    let ids = ids_of(&learner.model())?;
    let of_id = |(path, id): &(String, u64)| {
        let (dims, rows) = divided.get(path)?;
        Some((*id, (path.clone(), dims.clone(), rows.clone())))
    };
    let divided_ids = ids.iter().filter_map(of_id).collect();
    let ((), exchange) = with(Exchange::Cut(divided, HashSet::new()), || learner.load_model(record));
    if let Exchange::Cut(_, cut) = exchange {
        missing.retain(|path| !cut.contains(path));
    }
    if let Some(path) = missing.iter().min() {
        return Err(Error::invalid(format!(
            "{path} is to be sharded, but the learner was not prepared for that: make it by `ddp.learner(model, optim, \
            lr_scheduler, &config)?` with the settings of `training_with`, and not by `Learner::new`"
        )));
    }
    let state = state_of(learner, events)?;
    if !state.is_empty() {
        let own = cut_state(&bytes_of(state)?, &divided_ids)?;
        learner.load_optim(read(own)?);
    }
    Ok(())
}

/// Reads all that `learner` has loaded, and returns the hash of its parameters. Burn reads a file when its values are
/// first used, and a checkpoint of the same epoch may have overwritten it by then.
pub(super) fn read_loaded<M: LearnerModel>(learner: &mut Learner<M>, events: &EventStoreClient) -> Result<String> {
    let model = learner.model();
    let hash = param_hash(&model)?;
    learner.load_model(model.into_record());
    let state = state_of(learner, events)?;
    if !state.is_empty() {
        learner.load_optim(read(bytes_of(state)?)?);
    }
    Ok(hash)
}

/// A learner to be saved: the one that trains, with the whole state of the optimizer, and whole values of the model.
pub(super) struct WholeLearner<M: LearnerModel> {
    learner: Learner<M>,
    wholes: HashMap<String, TensorData>,
}

impl<M: LearnerModel> WholeLearner<M> {
    /// Gathers the whole values and state on rank 0; the other ranks get `None`. `tapped` is the learner's model with
    /// its taps. *Collective*.
    #[track_caller]
    pub(super) fn gather(
        ddp: &Ddp,
        learner: &Learner<M>,
        tapped: &M,
        events: &EventStoreClient,
    ) -> Result<Option<Self>> {
        let (group, is_main) = (ddp.group(), ddp.is_main());
        let state = || state_of(learner, events).and_then(bytes_of);
        let own = values(tapped).and_then(|(_, values)| Ok((values, state()?, ids_of(tapped)?)));
        let (values, state, ids) = agreement::on_outcome(group, "save its learner", own)?;
        let mut wholes = HashMap::new();
        for value in values.iter().filter(|value| value.is_sharded()) {
            let whole = value.whole()?;
            if is_main {
                wholes.insert(value.path.clone(), whole);
            }
        }
        let parts = parts(tapped);
        let state = agreement::on_outcome(group, "save its learner", StateInParts::read(&state, &ids, &parts))?;
        let mut sink = if is_main { Sink::Memory(Vec::new()) } else { Sink::Absent };
        let work = FileWork { cannot: "cannot make the optimizer's state whole".into(), path: None };
        state.write(group, &mut sink, &work)?;
        let Sink::Memory(state) = sink else { return Ok(None) };
        let mut learner = learner.clone();
        learner.load_optim(read(state)?);
        Ok(Some(WholeLearner { learner, wholes }))
    }

    /// Burn's `LearningCheckpointer::checkpoint`.
    pub(super) fn checkpoint(
        self,
        checkpointer: &mut LearningCheckpointer<M>,
        epoch: usize,
        events: &EventStoreClient,
    ) {
        with(Exchange::Save(self.wholes), || checkpointer.checkpoint(&self.learner, epoch, events));
    }
}

/// The state of the learner's optimizer, read by a checkpointer, since Burn gives access to it in no other way.
fn state_of<M: LearnerModel>(learner: &Learner<M>, events: &EventStoreClient) -> Result<OptimizerRecord> {
    struct EachTime;
    impl CheckpointingStrategy for EachTime {
        fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
            vec![CheckpointingAction::Save]
        }
    }
    let state = Keep::default();
    let mut checkpointer = LearningCheckpointer::new(
        AsyncCheckpointer::new(Keep::default()),
        AsyncCheckpointer::new(state.clone()),
        AsyncCheckpointer::new(Keep::default()),
        Box::new(EachTime),
    );
    with(Exchange::Parts, || checkpointer.checkpoint(learner, 0, events));
    // Waits for its threads.
    drop(checkpointer);
    let state = state.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    state.ok_or_else(|| Error::invalid("Burn's learner did not show the state of its optimizer"))
}

/// A checkpointer that holds the record that was saved last.
struct Keep<R>(Arc<Mutex<Option<R>>>);

impl<R> Default for Keep<R> {
    fn default() -> Self {
        Keep(Arc::default())
    }
}

impl<R> Clone for Keep<R> {
    fn clone(&self) -> Self {
        Keep(self.0.clone())
    }
}

impl<R: Checkpoint> Checkpointer<R> for Keep<R> {
    fn save(&self, _: usize, record: R) -> Result<(), CheckpointerError> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing is restored from here".into()))
    }
}

/// The state `bytes` of whole parameters, as Burn wrote it, cut to the given rows of the parameters in `parts`: path,
/// shape and rows by id.
///
/// # Errors
///
/// [`Error::Invalid`] if the state of a part has another shape than the parameter.
fn cut_state(bytes: &[u8], parts: &HashMap<u64, (String, Vec<usize>, Range<usize>)>) -> Result<Vec<u8>> {
    let unusable = |e: String| Error::invalid(format!("the optimizer's state cannot be divided: {e}"));
    let pack = Pack::read(bytes).map_err(unusable)?;
    let (mut own, mut data) = (Vec::new(), Vec::<u8>::new());
    for (mut stored, place) in tensors(&pack.header).map_err(unusable)? {
        let mut value = pack.data().get(place).ok_or_else(|| unusable("it is cut off".into()))?;
        let part = split(&stored.name).and_then(|(id, field)| Some((parts.get(&id)?, field)));
        if let Some(((path, dims, rows), field)) = part {
            if stored.dims != *dims {
                let found = &stored.dims;
                return Err(unusable(format!("{field} of {path} has shape {found:?}, and the parameter {dims:?}")));
            }
            let row_bytes = stored.len_bytes / dims[0];
            value = &value[rows.start * row_bytes..rows.end * row_bytes];
            (stored.dims[0], stored.len_bytes) = (rows.len(), value.len());
        }
        data.resize(aligned(data.len()), 0);
        data.extend_from_slice(value);
        own.push(stored);
    }
    let header = header(&own, &others(&pack.header)).and_then(|header| header_bytes(&header));
    Ok([header.map_err(unusable)?, data].concat())
}

fn bytes_of(state: OptimizerRecord) -> Result<Vec<u8>> {
    let bytes = state.into_bytes().map_err(|e| Error::invalid(format!("the optimizer's state: {e}")))?;
    Ok(bytes.try_into_vec().unwrap_or_else(|bytes| bytes.to_vec()))
}

fn read(state: Vec<u8>) -> Result<OptimizerRecord> {
    let state = OptimizerRecord::from_bytes(Bytes::from_bytes_vec(state));
    state.map_err(|e| Error::invalid(format!("the optimizer's state: {e}")))
}
