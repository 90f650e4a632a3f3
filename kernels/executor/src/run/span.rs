//! A part of a run.

use tandem_tracegraph::ids::StorageId;

use crate::run::block_run::{BlockRun, Segment};
use crate::run::cursor::Cursor;

/// A part of a run: some of its segments, and their feeds.
#[derive(Clone, Copy, Debug)]
pub struct Span<'r> {
    /// Whole run.
    pub run: &'r BlockRun,
    /// Positions at which the part's feeds begin in the run's streams.
    pub base: Cursor,
    /// Segments of the part.
    pub segments: &'r [Segment],
    /// Part of [`BlockRun::variants`].
    pub variants: &'r [u32],
    /// Part of [`BlockRun::storages`].
    pub storages: &'r [StorageId],
    /// Part of [`BlockRun::offsets`].
    pub offsets: &'r [i64],
    /// Storages that the program has dropped and that no later part of the run uses.
    pub released: &'r [StorageId],
}

impl<'r> Span<'r> {
    /// The span of a whole run.
    pub fn whole(run: &'r BlockRun) -> Span<'r> {
        Span {
            run,
            base: Cursor::default(),
            segments: &run.segments,
            variants: &run.variants,
            storages: &run.storages,
            offsets: &run.offsets,
            released: &run.released,
        }
    }
}
