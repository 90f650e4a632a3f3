//! Liveness: which ops of a run need not be run, and when storages that the program dropped can go.
//!
//! An op is dead where the program dropped everything that it makes before the run was sent, no other op of the run
//! that is alive reads it, and the op does nothing else: it writes nothing, draws nothing, and cannot fail.

use tandem_tracegraph::ids::StorageId;
use tandem_tracegraph::node::{InputSpec, OutSpec, Variant};

use crate::run::block_run::Step;
use crate::run::span::Span;

/// A storage that the program dropped.
const RELEASED: u32 = 1 << 31;
/// Its last use was found.
const ENDED: u32 = 1 << 30;

/// Finds dead ops; keeps its memory from run to run.
#[derive(Debug, Default)]
pub struct Liveness {
    /// How often each storage stands in the run; with [`RELEASED`] and [`ENDED`].
    uses: Vec<u32>,
    /// Where each op's storages begin in the run's stream.
    starts: Vec<u32>,
    dead: Vec<bool>,
    /// Storages that go, and the ops before which they do: the last ones first.
    ends: Vec<(u32, StorageId)>,
}

/// Whether an op does nothing but make fresh floating-point tensors.
fn only_computes(step: &Step, variant: &Variant) -> bool {
    let floating = |out: &OutSpec| matches!(out, OutSpec::Fresh { meta, .. } if meta.dtype.is_floating());
    step.pure && !variant.outputs.outs.is_empty() && variant.outputs.outs.iter().all(floating)
}

impl Liveness {
    /// Looks at a part of a run, whose ops in order are `ops`.
    pub fn look<'a>(
        &mut self,
        run: &Span<'_>,
        ops: impl DoubleEndedIterator<Item = (&'a Step, &'a Variant)> + Clone,
    ) {
        self.dead.clear();
        self.dead.resize(run.variants.len(), false);
        self.starts.clear();
        self.ends.clear();
        let mut start = 0;
        for (step, variant) in ops.clone() {
            self.starts.push(start as u32);
            let inputs = step.key.inputs.iter().filter(|i| **i == InputSpec::Storage).count();
            start += inputs + variant.outputs.fresh.len();
        }
        let highest = run.storages.iter().chain(run.released).map(|id| id.index() + 1).max().unwrap_or(0);
        if self.uses.len() < highest {
            self.uses.resize(highest, 0);
        }
        run.storages.iter().for_each(|id| self.uses[id.index()] += 1);
        run.released.iter().for_each(|id| self.uses[id.index()] |= RELEASED);
        let mut end = run.storages.len();
        for (i, (step, variant)) in (0..run.variants.len()).rev().zip(ops.rev()) {
            let storages = &run.storages[self.starts[i] as usize..end];
            end = self.starts[i] as usize;
            let (inputs, made) = storages.split_at(storages.len() - variant.outputs.fresh.len());
            for id in storages {
                let uses = &mut self.uses[id.index()];
                if *uses & (RELEASED | ENDED) == RELEASED {
                    *uses |= ENDED;
                    self.ends.push((i as u32 + 1, *id));
                }
            }
            let unread = |id: &StorageId| self.uses[id.index()] == RELEASED | ENDED | 1;
            if only_computes(step, variant) && made.iter().all(unread) {
                self.dead[i] = true;
                inputs.iter().for_each(|id| self.uses[id.index()] -= 1);
            }
        }
        for id in run.released {
            if self.uses[id.index()] & ENDED == 0 {
                self.ends.push((0, *id)); // no op uses it
            }
        }
        run.storages.iter().chain(run.released).for_each(|id| self.uses[id.index()] = 0);
    }

    /// Whether the `i`-th op is dead.
    pub fn is_dead(&self, i: usize) -> bool {
        self.dead[i]
    }

    /// The next storage that the program dropped and no op from the `i`-th on uses, once each.
    pub fn ended_before(&mut self, i: usize) -> Option<StorageId> {
        let (end, _) = self.ends.last()?;
        if *end as usize <= i { self.ends.pop().map(|(_, id)| id) } else { None }
    }
}
