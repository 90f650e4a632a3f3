//! What the executor computes itself, whichever way.

use std::fmt;

use crate::cpu::own;
use crate::cpu::own::Kernel;
use crate::cpu::tiles::group::Group;
use crate::cpu::tiles::summed::Summed;
use crate::host::HostKernels;
use crate::ops::express::{Param, Window};
use crate::plan::{Draft, Ending, Feed, Slot};

/// A computation on windows. `S` says where they begin, `P` where parameters come from.
#[derive(Debug)]
pub struct Computation<S, P> {
    /// Where windows begin.
    pub slots: Box<[S]>,
    /// Where parameters come from.
    pub params: Box<[P]>,
    /// What is done.
    pub work: Work,
}

/// See [`Computation`].
pub enum Work {
    /// Expressions of elements.
    Tiles(Group),
    /// Expressions of elements, and sums of them.
    Summed(Summed),
    /// An operator's kernel.
    Kernel(own::Work),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Tiles(group) => fmt::Display::fmt(group, f),
            Work::Summed(summed) => fmt::Display::fmt(summed, f),
            Work::Kernel(_) => f.write_str("[kernel]"),
        }
    }
}

impl Computation<Slot, Feed> {
    /// Of a draft of one lane with sums of its values; the draft again where [`Summed::compile`] refuses it.
    pub fn summed(
        mut draft: Draft<Slot, Feed>,
        ending: &Ending,
        aliases: impl Fn(Slot, Slot) -> bool,
    ) -> Result<Computation<Slot, Feed>, Draft<Slot, Feed>> {
        match Summed::compile(&mut draft, ending, aliases) {
            Some(summed) => Ok(Computation::of_draft(draft, Work::Summed(summed))),
            None => Err(draft),
        }
    }
}

impl<S: Copy, P> Computation<S, P> {
    /// Of a draft's expressions. `aliases` says whether two slots may be in the same memory.
    pub fn compile(draft: Draft<S, P>, aliases: impl Fn(S, S) -> bool) -> Option<Computation<S, P>> {
        let group = Group::compile(&draft, aliases)?;
        Some(Computation::of_draft(draft, Work::Tiles(group)))
    }
}

impl<S, P> Computation<S, P> {
    fn of_draft(draft: Draft<S, P>, work: Work) -> Computation<S, P> {
        Computation { slots: draft.slots.into(), params: draft.params.into(), work }
    }

    /// Of a kernel.
    pub fn of(kernel: Kernel, slot: impl Fn(&Window) -> S, param: impl Fn(Param) -> P) -> Computation<S, P> {
        let slots = kernel.windows.iter().map(slot).collect();
        let params = kernel.params.iter().map(|p| param(*p)).collect();
        Computation { slots, params, work: Work::Kernel(kernel.work) }
    }

    /// Computes. `data` are the slots' first elements, `params` the parameters' bits. False, and nothing that matters
    /// done, where PyTorch's kernel has to run.
    ///
    /// # Safety
    /// All windows lie in live memory; what is written nobody else reads or writes meanwhile, and no other window of
    /// this computation shares it but by being the same one of the same lane.
    pub unsafe fn run(&self, host: &dyn HostKernels, data: &[*mut u8], params: &[u64]) -> bool {
        match &self.work {
            // SAFETY: the caller's promise.
            Work::Tiles(group) => unsafe { group.run(host, data, params) },
            // SAFETY: as above.
            Work::Summed(summed) => return unsafe { summed.run(host, data, params) },
            Work::Kernel(work) => return work(host, data, params),
        }
        true
    }
}

impl<S, P> fmt::Display for Computation<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.work, f)
    }
}
