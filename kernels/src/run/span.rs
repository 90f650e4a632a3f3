//! A part of a run.

use tandem_tracegraph::ids::StorageId;

use crate::run::block_run::{BlockRun, Segment};
use crate::run::cursor::Cursor;

/// A part of a run: some of its segments, and what is fed to them.
#[derive(Clone, Copy, Debug)]
pub struct Span<'r> {
    /// The run.
    pub run: &'r BlockRun,
    /// Where its feeds begin in the run's streams.
    pub base: Cursor,
    /// Its segments.
    pub segments: &'r [Segment],
    /// See [`BlockRun::variants`].
    pub variants: &'r [u32],
    /// See [`BlockRun::storages`].
    pub storages: &'r [StorageId],
    /// See [`BlockRun::offsets`].
    pub offsets: &'r [i64],
    /// Storages that the program dropped and that nothing behind it uses.
    pub released: &'r [StorageId],
}

impl<'r> Span<'r> {
    /// All of a run.
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
