//! Warnings of parameters that have no gradient on any rank: in the first step, or for several steps after they had
//! one, as if they had lost their tap.

/// Steps in a row without a gradient, after which a parameter that had one before is suspected.
pub(super) const STEPS: u32 = 8;

/// Steps without gradients, counted for each slot of a wrapped model.
#[derive(Default)]
pub(super) struct AbsentGradients {
    /// True once the user was warned of [`Suspects::Lost`].
    pub(super) warned_lost: bool,
    /// Steps since the last gradient; `None` for a slot that has had none. Empty before the first step.
    since: Vec<Option<u32>>,
}

/// Slots to warn of.
#[derive(Debug, PartialEq)]
pub(super) enum Suspects {
    /// They had no gradient in the first step.
    Never(Vec<usize>),
    /// They have had none for [`STEPS`] steps.
    Lost(Vec<usize>),
}

impl AbsentGradients {
    /// Counts a step; `present` says for each slot whether some rank had a gradient of it.
    pub(super) fn note_step(&mut self, present: &[bool]) -> Option<Suspects> {
        let slots = 0..present.len();
        if self.since.is_empty() {
            self.since = present.iter().map(|present| present.then_some(0)).collect();
            return Some(Suspects::Never(slots.filter(|slot| !present[*slot]).collect()));
        }
        for (since, present) in self.since.iter_mut().zip(present) {
            *since = if *present { Some(0) } else { since.map(|steps| steps.saturating_add(1)) };
        }
        let lost: Vec<usize> = slots.filter(|slot| self.since[*slot] == Some(STEPS)).collect();
        (!lost.is_empty()).then_some(Suspects::Lost(lost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_never_there_and_what_went_are_told_apart() {
        let mut absent = AbsentGradients::default();
        assert_eq!(absent.note_step(&[true, false, true]), Some(Suspects::Never(vec![1])));
        for _ in 1..STEPS {
            assert_eq!(absent.note_step(&[true, false, false]), None);
        }
        // One step with a gradient: it is counted anew.
        assert_eq!(absent.note_step(&[true, false, true]), None);
        for _ in 1..STEPS {
            assert_eq!(absent.note_step(&[true, false, false]), None);
        }
        assert_eq!(absent.note_step(&[true, false, false]), Some(Suspects::Lost(vec![2])));
        // Once for a slot, until it has a gradient again.
        assert_eq!(absent.note_step(&[false, false, false]), None);
        for _ in 2..STEPS {
            assert_eq!(absent.note_step(&[false, false, false]), None);
        }
        assert_eq!(absent.note_step(&[false, false, false]), Some(Suspects::Lost(vec![0])));
        for _ in 0..2 * STEPS {
            assert_eq!(absent.note_step(&[false, false, false]), None);
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_parameter_that_lost_its_tap_beside_a_living_copy_is_warned_of() {
        use crate::Ddp;
        use crate::intercept::warning_test_model::Pair;
        use crate::telemetry::test_event_capture::Listener;

        let warnings = |replaced: bool| {
            Ddp::spawn(2, |ddp| {
                let listener = Listener::default();
                tracing::subscriber::with_default(listener.clone(), || {
                    let mut model = ddp.wrap(Pair::ones())?;
                    let _average_of_weights = model.clone();
                    for step in 0..12 {
                        if replaced && step == 2 {
                            model.b = model.b.map(|value| value);
                        }
                        // A copy that keeps its tap may go unused.
                        let uses_b = replaced || step < 2;
                        let grads = if uses_b { model.a.val() + model.b.val() } else { model.a.val() * 1.0 }.backward();
                        model = model.step(grads);
                    }
                    anyhow::Ok(())
                })?;
                Ok(listener.events("burn_ddp::unused"))
            })
        };
        assert!(warnings(false).unwrap().iter().all(Vec::is_empty));
        let [main, other] = warnings(true).unwrap().try_into().expect("two ranks");
        assert_eq!((main.len(), other.len()), (1, 0), "{main:?}");
        assert!(main[0].contains(&("parameters".into(), "\"b\"".into())), "{main:?}");
    }
}
