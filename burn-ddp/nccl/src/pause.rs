//! Pauses between two looks at something that another thread or a device does.

use std::time::Duration;

/// Short at first, since most is done soon, then longer, since a wait may be one for minutes.
#[derive(Debug)]
pub(crate) struct Pause {
    nth: u32,
}

impl Pause {
    const YIELDS: u32 = 200;
    const LONGEST: Duration = Duration::from_millis(1);

    pub(crate) fn new() -> Pause {
        Pause { nth: 0 }
    }

    pub(crate) fn wait(&mut self) {
        self.nth = self.nth.saturating_add(1);
        if self.nth <= Pause::YIELDS {
            std::thread::yield_now();
        } else {
            let longer = Duration::from_micros(u64::from(self.nth - Pause::YIELDS).saturating_mul(10));
            std::thread::sleep(longer.min(Pause::LONGEST));
        }
    }
}
