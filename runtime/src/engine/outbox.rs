//! The outbox: validated ops on their way to GraphRunner.
//!
//! **Why.** A message for each op would cost more than the op.
//! **Strategy.** Validated ops are appended to the open run, which is sent once it has enough ops or its results are
//! needed. Lazy evaluation holds the runs back until a value is needed.
//! **Freeing.** A run also carries the ids of the storages that the program dropped before the run was sent.

use std::collections::VecDeque;

use tandem_executor::executor::Immediate;
use tandem_executor::host::Exception;
use tandem_executor::run::{BlockRun, Cursor, Segment};
use tandem_tracegraph::call::Call;
use tandem_tracegraph::ids::{BlockId, StorageId};
use tandem_tracegraph::node::NodeKey;

use crate::function::{Tail, end_of};
use crate::graph_runner::Ticket;
use crate::issuer;
use crate::storage::Storages;
use crate::torch::Torch;

/// Validated ops that GraphRunner does not have yet, and the dead storages whose release the next run carries.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Open run: validated ops that have not been sent.
    open: Box<BlockRun>,
    /// Number of ops at which the next run is sent to GraphRunner.
    pace: usize,
    /// Whether long blocks are divided into runs of full size.
    divides: bool,
    /// Runs that lazy evaluation holds back until a value is needed.
    held: VecDeque<Box<BlockRun>>,
    /// Ids of storages that died since the last run was sent.
    dying: Vec<StorageId>,
    /// Position after the latest sent run that draws random numbers. The two flags below say whether the open run and
    /// the held runs draw random numbers.
    random: Ticket,
    random_open: bool,
    random_held: bool,
    /// Whether runs note the issuer of each op.
    notes_issuers: bool,
}

impl Outbox {
    /// Creates an empty outbox whose first run is sent with this number of ops.
    pub(super) fn new(first_run_ops: usize) -> Outbox {
        Outbox {
            open: Box::default(),
            pace: first_run_ops,
            divides: false,
            held: VecDeque::new(),
            dying: Vec::new(),
            random: Ticket::default(),
            random_open: false,
            random_held: false,
            notes_issuers: false,
        }
    }

    /// Sets whether runs note the issuer of each op. The open run must be empty.
    pub(super) fn note_issuers(&mut self, on: bool) {
        self.notes_issuers = on;
    }

    /// Adds the storages, offsets and host tensors of the next op's inputs to the open run. If a host tensor cannot
    /// be copied, nothing is added.
    #[inline(always)]
    pub(super) fn feed_inputs(&mut self, call: &Call<'_>, torch: &dyn Torch) -> Result<(), Exception> {
        crate::feed::inputs(&mut self.open, call, torch)
    }

    /// Adds the op at index `number` of a block, under a variant.
    #[inline(always)]
    pub(super) fn push(&mut self, block: BlockId, number: u32, variant: u32) {
        self.open.push(block, number, variant);
        if self.notes_issuers {
            self.open.issuers.push(issuer::current());
        }
    }

    /// Adds the numbers and generators of the latest op.
    #[inline(always)]
    pub(super) fn feed_values(&mut self, key: &NodeKey, call: &Call<'_>, torch: &dyn Torch) {
        crate::feed::values(&mut self.open, key, call, torch);
    }

    /// Adds a storage that the latest op creates.
    #[inline(always)]
    pub(super) fn feed_fresh(&mut self, storage: StorageId) {
        self.open.storages.push(storage);
    }

    /// Records whether the latest op draws random numbers.
    #[inline(always)]
    pub(super) fn note_draws(&mut self, random: bool) {
        self.random_open |= random;
    }

    /// Returns the position after all feeds of the open run.
    pub(super) fn end(&self) -> Cursor {
        end_of(&self.open)
    }

    /// Returns the feeds of the open run from a position on.
    pub(super) fn since(&self, from: Cursor) -> Tail<'_> {
        Tail::new(&self.open, from)
    }

    /// Adds all ops of a function's block to the open run, which must be empty.
    pub(super) fn add_function(&mut self, block: BlockId, ops: u32, fill: impl FnOnce(&mut BlockRun)) {
        self.open.segments.push(Segment { block, from: 0, to: ops });
        fill(&mut self.open);
        if self.notes_issuers {
            self.open.issuers.resize(ops as usize, issuer::current());
        }
    }

    /// Returns whether the open run has enough ops to be sent. `number` is the index of the run's last op in its block,
    /// and `at_end` says whether that op ends the block. Runs for the program's own thread (`inline`) need `run_ops`
    /// ops from the start, other runs as many as the pace says.
    #[inline(always)]
    pub(super) fn is_enough(&self, number: u32, at_end: bool, inline: bool, run_ops: usize) -> bool {
        let enough = if inline { run_ops } else { self.pace };
        // Until runs have reached their full size, they may end within a block, so that GraphRunner gets work
        // early.
        let anywhere = !inline && self.pace < run_ops;
        let divided = self.divides && (number as usize + 1).is_multiple_of(run_ops);
        divided || (at_end || anywhere) && self.open.len() >= enough
    }

    /// Divides long blocks into runs of full size, always at the same ops, so that their plans recur.
    pub(super) fn divide(&mut self) {
        self.divides = true;
    }

    /// Doubles the number of ops of the next run, up to `run_ops`.
    pub(super) fn raise_pace(&mut self, run_ops: usize) {
        self.pace = (self.pace * 2).min(run_ops);
    }

    /// Makes the next run short again, because GraphRunner has no work.
    pub(super) fn reset_pace(&mut self, first_run_ops: usize) {
        self.pace = first_run_ops;
    }

    /// Returns whether no run is held back and the open run has at most this number of ops.
    pub(super) fn has_at_most(&self, ops: usize) -> bool {
        self.open.len() <= ops && self.held.is_empty()
    }

    /// Returns the number of runs that are held back.
    pub(super) fn held(&self) -> u64 {
        self.held.len() as u64
    }

    /// Returns whether the open run draws random numbers.
    pub(super) fn draws(&self) -> bool {
        self.random_open
    }

    /// Returns the position after the latest sent run that draws random numbers.
    pub(super) fn last_draw(&self) -> Ticket {
        self.random
    }

    /// Collects the storages that have died.
    pub(super) fn collect_dead(&mut self, storages: &mut Storages) {
        storages.collect_dead(&mut self.dying);
    }

    /// Releases the dead storages at once. The ops that use them must have been executed.
    pub(super) fn release_dead(&mut self, storages: &mut Storages, device: &mut dyn Immediate) {
        for id in &self.dying {
            device.release(*id);
        }
        storages.recycle(&self.dying);
        self.dying.clear();
    }

    /// Records that the program reads a value as soon as the open run has ended. Without an open run it has no effect.
    pub(super) fn is_fetched(&mut self) {
        self.open.fetched = !self.open.is_empty();
    }

    /// Completes the open run, and adds the storages that the program has dropped. Returns `None` if the run is empty.
    pub(super) fn close(&mut self, iteration: u64, storages: &mut Storages) -> Option<&BlockRun> {
        if self.open.is_empty() {
            return None;
        }
        self.collect_dead(storages);
        self.open.iteration = iteration;
        self.open.released.append(&mut self.dying);
        Some(&self.open)
    }

    /// Executes the closed run with `execute` and returns the result.
    pub(super) fn run<R>(&mut self, storages: &mut Storages, execute: impl FnOnce(&BlockRun) -> R) -> R {
        let result = execute(&self.open);
        storages.recycle(&self.open.released);
        self.open.clear();
        self.random_open = false;
        result
    }

    /// Sends the closed run with `send`. `blank` is the next open run.
    pub(super) fn send(
        &mut self,
        blank: Box<BlockRun>,
        storages: &mut Storages,
        send: impl FnOnce(Box<BlockRun>) -> Ticket,
    ) {
        let run = std::mem::replace(&mut self.open, blank);
        storages.recycle(&run.released);
        let ticket = send(run);
        if std::mem::take(&mut self.random_open) {
            self.random = ticket;
        }
    }

    /// Holds the closed run back. `blank` is the next open run.
    pub(super) fn hold(&mut self, blank: Box<BlockRun>) {
        self.held.push_back(std::mem::replace(&mut self.open, blank));
        self.random_held |= std::mem::take(&mut self.random_open);
    }

    /// Sends the runs that were held back.
    pub(super) fn release_held(
        &mut self,
        storages: &mut Storages,
        mut send: impl FnMut(Box<BlockRun>) -> Ticket,
    ) {
        while let Some(run) = self.held.pop_front() {
            storages.recycle(&run.released);
            let ticket = send(run);
            if self.random_held {
                self.random = ticket;
            }
        }
        self.random_held = false;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tandem_executor::error::{CallFailure, Failure};
    use tandem_tracegraph::ids::{LocationId, Name};
    use tandem_tracegraph::node::Outputs;

    use super::*;
    use crate::storage::{AddressRange, collects_deaths, died};

    /// Device that only records the released storages.
    #[derive(Default)]
    struct Device(Vec<StorageId>);

    impl Immediate for Device {
        fn name(&self) -> &'static str {
            "releases"
        }

        fn allocate(&mut self, _: StorageId, _: u8, _: u64) -> Result<(), CallFailure> {
            unreachable!("it only releases")
        }

        fn resize(&mut self, _: StorageId, _: u64) -> Result<(), CallFailure> {
            unreachable!("it only releases")
        }

        fn release(&mut self, id: StorageId) {
            self.0.push(id);
        }

        fn upload(&mut self, _: StorageId, _: u64, _: &[u8]) -> Result<(), Arc<Failure>> {
            unreachable!("it only releases")
        }

        fn download(&mut self, _: StorageId, _: u64, _: &mut [u8]) -> Result<(), Arc<Failure>> {
            unreachable!("it only releases")
        }

        fn call(
            &mut self,
            _: &Call<'_>,
            _: LocationId,
            _: &mut dyn FnMut(u64) -> StorageId,
        ) -> Result<Outputs, CallFailure> {
            unreachable!("it only releases")
        }

        fn synchronize(&mut self) -> Vec<Arc<Failure>> {
            Vec::new()
        }
    }

    fn storages() -> Storages {
        // Storages of tests on other threads die in lists of their own.
        let _collector = collects_deaths();
        Storages::new(AddressRange::new(1 << 47, 1 << 40))
    }

    fn create(storages: &mut Storages) -> StorageId {
        storages.create(4, 0, Name::STATE).id
    }

    /// Returns an outbox whose open run has `ops` ops. `random` says whether the last op draws random numbers.
    fn outbox(ops: u32, random: bool) -> Outbox {
        let mut outbox = Outbox::new(4);
        (0..ops).for_each(|i| outbox.push(BlockId(0), i, 0));
        outbox.note_draws(random);
        outbox
    }

    #[test]
    fn runs_grow_until_they_have_their_full_size() {
        let mut outbox = Outbox::new(4);
        let mut lengths = Vec::new();
        for i in 0..60 {
            outbox.push(BlockId(0), i, 0);
            // Each block has ten ops.
            if outbox.is_enough(i, i % 10 == 9, false, 16) {
                lengths.push(outbox.open.len());
                outbox.open.clear();
                outbox.raise_pace(16);
            }
        }
        assert_eq!(lengths, [4, 8, 18, 20], "a run of full size ends with a block");
        outbox.reset_pace(4);
        assert!(outbox.is_enough(60, false, false, 16), "a short run is sent within a block");
    }

    #[test]
    fn runs_on_the_programs_thread_have_their_full_size_at_once() {
        let outbox = outbox(8, false);
        assert!(outbox.is_enough(7, false, false, 16));
        assert!(!outbox.is_enough(7, true, true, 16));
        assert!(outbox.is_enough(7, true, true, 8));
        assert!(!outbox.is_enough(7, false, true, 8), "only at the end of a block");
    }

    #[test]
    fn long_blocks_are_divided_at_the_same_ops() {
        let mut outbox = outbox(3, false);
        outbox.pace = 16;
        assert!(!outbox.is_enough(15, false, false, 16));
        outbox.divide();
        assert!(outbox.is_enough(15, false, false, 16) && outbox.is_enough(31, false, true, 16));
        assert!(!outbox.is_enough(16, false, false, 16));
    }

    #[test]
    fn an_empty_run_is_not_closed() {
        let mut storages = storages();
        assert!(outbox(0, false).close(1, &mut storages).is_none());
        let mut outbox = outbox(2, false);
        assert_eq!(outbox.close(7, &mut storages).map(|run| (run.len(), run.iteration)), Some((2, 7)));
        assert!(outbox.has_at_most(2) && !outbox.has_at_most(1));
    }

    #[test]
    fn the_id_of_a_dead_storage_is_free_once_its_release_is_sent() {
        let mut storages = storages();
        let dead = create(&mut storages);
        let mut outbox = outbox(1, false);
        died(dead);
        outbox.close(1, &mut storages);
        assert_ne!(create(&mut storages), dead);
        outbox.send(Box::default(), &mut storages, |run| {
            assert_eq!(run.released, [dead]);
            Ticket::default()
        });
        assert_eq!(create(&mut storages), dead);
        outbox.push(BlockId(0), 0, 0);
        let released = outbox.close(1, &mut storages).map(|run| run.released.len());
        assert_eq!(released, Some(0), "it is released once");
    }

    #[test]
    fn dead_storages_are_released_at_once_for_an_idle_executor() {
        let mut storages = storages();
        let (dead, device) = (create(&mut storages), &mut Device::default());
        let mut outbox = outbox(0, false);
        died(dead);
        outbox.collect_dead(&mut storages);
        outbox.release_dead(&mut storages, device);
        outbox.release_dead(&mut storages, device);
        assert_eq!(device.0, [dead]);
        assert_eq!(create(&mut storages), dead);
    }

    #[test]
    fn a_run_that_was_executed_leaves_an_empty_one() {
        let mut storages = storages();
        let dead = create(&mut storages);
        let mut outbox = outbox(3, true);
        died(dead);
        outbox.close(1, &mut storages);
        assert_eq!(outbox.run(&mut storages, BlockRun::len), 3);
        assert!(outbox.has_at_most(0) && !outbox.draws());
        assert_eq!(create(&mut storages), dead);
    }

    #[test]
    fn the_position_of_the_last_draw_is_that_of_its_run() {
        let mut storages = storages();
        let mut drawing = outbox(2, true);
        assert!(drawing.draws());
        drawing.send(Box::default(), &mut storages, |_| Ticket::NEVER);
        assert!(!drawing.draws());
        assert_eq!(drawing.last_draw(), Ticket::NEVER);
        let mut plain = outbox(2, false);
        plain.send(Box::default(), &mut storages, |_| Ticket::NEVER);
        assert_eq!(plain.last_draw(), Ticket::default());
    }

    #[test]
    fn runs_that_are_held_back_are_sent_in_order() {
        let mut storages = storages();
        let mut outbox = outbox(1, true);
        outbox.hold(Box::default());
        assert!(!outbox.draws(), "the open run draws nothing");
        (0..2).for_each(|i| outbox.push(BlockId(0), i, 0));
        outbox.hold(Box::default());
        assert_eq!(outbox.held(), 2);
        assert!(!outbox.has_at_most(100));
        let mut sent = Vec::new();
        outbox.release_held(&mut storages, |run| {
            sent.push(run.len());
            Ticket::NEVER
        });
        assert_eq!(sent, [1, 2]);
        assert_eq!((outbox.held(), outbox.last_draw()), (0, Ticket::NEVER));
        outbox.random = Ticket::default();
        outbox.push(BlockId(0), 0, 0);
        outbox.hold(Box::default());
        outbox.release_held(&mut storages, |_| Ticket::NEVER);
        assert_eq!(outbox.last_draw(), Ticket::default(), "no run has drawn since");
    }
}
