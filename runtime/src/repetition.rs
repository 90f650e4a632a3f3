//! Programs whose traces never repeat: noticed by what co-execution yields.

/// Iterations that are looked at together.
const WINDOW: u32 = 16;
/// Iterations without recording, at first and at most.
const FIRST_PAUSE: u64 = 64;
const LONGEST_PAUSE: u64 = 4096;

/// Watches whether iterations repeat what others did.
///
/// The rule: where each of 16 iterations in a row added ops to the TraceGraph and fewer than half of its operator
/// calls ran from a generated graph, recording costs more than it yields. Then ops run at once and unrecorded for
/// 64 iterations, the next time for twice as many, up to 4096.
#[derive(Debug)]
pub struct Repetition {
    /// Iterations in a row that brought something new.
    novel: u32,
    pause: u64,
    /// Iterations of the pause that are left.
    left: u64,
}

impl Default for Repetition {
    fn default() -> Repetition {
        Repetition { novel: 0, pause: FIRST_PAUSE, left: 0 }
    }
}

impl Repetition {
    /// An iteration ended. `grew` says that it added an op; the others count its operator calls.
    pub fn note(&mut self, grew: bool, ops: u64, coexecuted: u64) {
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        if !grew || coexecuted * 2 >= ops {
            self.novel = 0;
            return;
        }
        self.novel += 1;
        if self.novel == WINDOW {
            self.novel = 0;
            self.left = self.pause;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Whether the next iteration is not to be recorded.
    pub fn pauses(&self) -> bool {
        self.left > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_never_repeats_is_left_alone() {
        let mut repetition = Repetition::default();
        for _ in 0..15 {
            repetition.note(true, 100, 20);
        }
        assert!(!repetition.pauses());
        repetition.note(true, 100, 20);
        let mut paused = 0;
        while repetition.pauses() {
            repetition.note(false, 100, 0);
            paused += 1;
        }
        assert_eq!(paused, 64);
    }

    #[test]
    fn growing_while_most_ops_co_execute_is_well() {
        let mut repetition = Repetition::default();
        for _ in 0..100 {
            repetition.note(true, 100, 60);
        }
        assert!(!repetition.pauses());
    }

    #[test]
    fn now_and_then_a_known_iteration_is_enough() {
        let mut repetition = Repetition::default();
        for i in 0..100 {
            repetition.note(i % 10 != 0, 100, if i % 10 == 0 { 100 } else { 0 });
        }
        assert!(!repetition.pauses());
    }
}
