//! Liveness: the ops of a run that need not run, and the points at which dropped storages can be released.
//!
//! An op is dead if the program dropped all storages that the op creates before the run was sent, no other live op of
//! the run reads them, and the op has no other effect:
//!
//! - It writes no input.
//! - It draws no random numbers.
//! - It cannot fail.

use tandem_tracegraph::ids::StorageId;
use tandem_tracegraph::node::{InputSpec, OutSpec, Variant};

use crate::run::block_run::OpDeclaration;
use crate::run::span::Span;

/// Flag of a storage that the program dropped.
const RELEASED: u32 = 1 << 31;
/// Flag of a storage whose last use has been found.
const ENDED: u32 = 1 << 30;

/// Liveness of one run. The object keeps its allocations for the next run.
#[derive(Debug, Default)]
pub struct Liveness {
    /// Number of occurrences of each storage in the run, combined with [`RELEASED`] and [`ENDED`].
    uses: Vec<u32>,
    /// Index of each op's first storage in the run's stream.
    starts: Vec<u32>,
    dead: Vec<bool>,
    /// Storages to release, each with the index of the op before which it is released, in reverse order.
    ends: Vec<(u32, StorageId)>,
}

/// Whether an op does nothing but create floating-point tensors.
fn only_computes(declared: &OpDeclaration, variant: &Variant) -> bool {
    let floating =
        |out: &OutSpec| matches!(out, OutSpec::NewStorage { meta, .. } if meta.dtype.is_floating());
    declared.pure && !variant.outputs.outs.is_empty() && variant.outputs.outs.iter().all(floating)
}

impl Liveness {
    /// Analyzes a part of a run with these ops, in order.
    pub fn look<'a>(
        &mut self,
        run: &Span<'_>,
        ops: impl DoubleEndedIterator<Item = (&'a OpDeclaration, &'a Variant)> + Clone,
    ) {
        self.dead.clear();
        self.dead.resize(run.variants.len(), false);
        self.starts.clear();
        self.ends.clear();
        let mut start = 0;
        for (declared, variant) in ops.clone() {
            self.starts.push(start as u32);
            let inputs = declared.key.inputs.iter().filter(|i| **i == InputSpec::Storage).count();
            start += inputs + variant.outputs.new_storages.len();
        }
        let highest = run.storages.iter().chain(run.released).map(|id| id.index() + 1).max().unwrap_or(0);
        if self.uses.len() < highest {
            self.uses.resize(highest, 0);
        }
        run.storages.iter().for_each(|id| self.uses[id.index()] += 1);
        run.released.iter().for_each(|id| self.uses[id.index()] |= RELEASED);
        let mut end = run.storages.len();
        for (i, (declared, variant)) in (0..run.variants.len()).rev().zip(ops.rev()) {
            let storages = &run.storages[self.starts[i] as usize..end];
            end = self.starts[i] as usize;
            let (inputs, made) = storages.split_at(storages.len() - variant.outputs.new_storages.len());
            for id in storages {
                let uses = &mut self.uses[id.index()];
                if *uses & (RELEASED | ENDED) == RELEASED {
                    *uses |= ENDED;
                    self.ends.push((i as u32 + 1, *id));
                }
            }
            let unread = |id: &StorageId| self.uses[id.index()] == RELEASED | ENDED | 1;
            if only_computes(declared, variant) && made.iter().all(unread) {
                self.dead[i] = true;
                inputs.iter().for_each(|id| self.uses[id.index()] -= 1);
            }
        }
        for id in run.released {
            if self.uses[id.index()] & ENDED == 0 {
                self.ends.push((0, *id)); // not used by any op
            }
        }
        run.storages.iter().chain(run.released).for_each(|id| self.uses[id.index()] = 0);
    }

    /// Whether the op with index `i` is dead.
    pub fn is_dead(&self, i: usize) -> bool {
        self.dead[i]
    }

    /// Removes and returns the next storage that the program dropped and that only ops with an index below `i` use.
    pub fn ended_before(&mut self, i: usize) -> Option<StorageId> {
        let (end, _) = self.ends.last()?;
        if *end as usize <= i { self.ends.pop().map(|(_, id)| id) } else { None }
    }
}
