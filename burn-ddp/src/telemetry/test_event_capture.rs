//! For tests: a subscriber that keeps the events of the library.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span;

/// Names and values of an event's fields.
type Fields = Vec<(String, String)>;

/// Keeps all events of our targets.
#[derive(Clone, Default)]
pub(crate) struct Listener(Arc<Mutex<Vec<(String, Fields)>>>);

impl Listener {
    /// The events of `target`, in order.
    pub(crate) fn events(&self, target: &str) -> Vec<Fields> {
        let events = self.0.lock().unwrap();
        events.iter().filter(|(of, _)| of == target).map(|(_, fields)| fields.clone()).collect()
    }
}

struct Collect(Fields);

impl Visit for Collect {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push((field.name().to_string(), format!("{value:?}")));
    }
}

impl tracing::Subscriber for Listener {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("burn_ddp::")
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut fields = Collect(Vec::new());
        event.record(&mut fields);
        self.0.lock().unwrap().push((event.metadata().target().to_string(), fields.0));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}
