//! The names of checkpoints in their directory.

const PREFIX: &str = "step-";

/// Name of a checkpoint: its step, and how often that step was saved before. Later checkpoints compare greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) step: u64,
    pub(super) attempt: u32,
}

impl Name {
    /// The inverse of `to_string`; `None` for anything else in the directory.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let numbers = text.strip_prefix(PREFIX)?;
        let (step, attempt) = numbers.split_once('.').unwrap_or((numbers, "0"));
        let name = Name { step: step.parse().ok()?, attempt: attempt.parse().ok()? };
        (name.to_string() == text).then_some(name)
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Name { step, attempt } = self;
        match attempt {
            0 => write!(f, "{PREFIX}{step:08}"),
            _ => write!(f, "{PREFIX}{step:08}.{attempt}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back_and_nothing_else_is_a_checkpoint() {
        for (step, attempt) in [(0, 0), (123, 0), (123, 2), (1_234_567_890_123, 0), (u64::MAX, 7)] {
            let name = Name { step, attempt };
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        assert_eq!(Name { step: 123, attempt: 0 }.to_string(), "step-00000123");
        for other in ["step-", "step-123", "step-00000123.0", "step-00000123.x", "step-+0000012", ".lock", "model.bpk"]
        {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }
}
