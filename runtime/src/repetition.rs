//! Detection of programs whose traces never repeat, by the share of ops that are co-executed.

/// Number of consecutive iterations from which the program is judged.
const WINDOW: u32 = 16;
/// Minimum and maximum number of iterations of a pause.
const FIRST_PAUSE: u64 = 64;
const LONGEST_PAUSE: u64 = 4096;

/// Detects iterations that do not repeat earlier ones.
///
/// If each of 16 consecutive iterations adds ops to the TraceGraph and co-executes fewer than half of its operator
/// calls, recording costs more than it saves. A pause follows: 64 iterations in which ops run immediately and are not
/// recorded. Each further pause is twice as long as the previous one, up to 4096 iterations.
#[derive(Debug)]
pub struct Repetition {
    /// Number of consecutive iterations that added ops and co-executed fewer than half of their calls.
    novel: u32,
    pause: u64,
    /// Number of iterations left in the pause.
    left: u64,
}

impl Default for Repetition {
    fn default() -> Repetition {
        Repetition { novel: 0, pause: FIRST_PAUSE, left: 0 }
    }
}

impl Repetition {
    /// Counts an iteration that has ended. `grew` says whether the iteration added an op, and `ops` and `coexecuted`
    /// are the numbers of all its operator calls and of the co-executed ones.
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

    /// Returns whether the next iteration runs unrecorded.
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
