//! What all ranks do with the averages of a call whose loss is scaled.

/// A gradient that is not finite, as far as it is known, also in words.
#[derive(Clone, Debug, Default)]
pub(super) struct Overflow {
    pub(super) rank: Option<usize>,
    pub(super) parameter: Option<String>,
    pub(super) words: String,
}

/// The verdict over a call, which may be of several models. The same on all ranks.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    /// One for each model with an average that is not finite.
    overflows: Vec<Overflow>,
    /// True if one of these models has a scale.
    blames_a_scale: bool,
}

impl Verdict {
    /// Takes in the overflow of a model of the call, which has a scale or not.
    pub(super) fn add(&mut self, overflow: Overflow, has_scale: bool) {
        self.overflows.push(overflow);
        self.blames_a_scale |= has_scale;
    }

    /// True if no model of the call makes a step.
    pub(super) fn skips(&self) -> bool {
        !self.overflows.is_empty()
    }

    /// True if the scale of a model falls, which has `overflowed` itself or not. Where only models without a scale
    /// have, all scales of the call do.
    pub(super) fn lowers_scale(&self, overflowed: bool) -> bool {
        self.skips() && (overflowed || !self.blames_a_scale)
    }

    /// The first gradient that is known, or some.
    pub(super) fn blamed(&self) -> Overflow {
        let known = self.overflows.iter().find(|overflow| overflow.parameter.is_some());
        known.or(self.overflows.first()).cloned().unwrap_or_default()
    }
}
