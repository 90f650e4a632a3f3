//! Groups: drafts as kernels, whose intermediate values stay in registers.

use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::gpu::bundle::Bundle;
use crate::gpu::epilogue::Epilogue;
use crate::gpu::kernel::{Groups, Kernel};
use crate::gpu::lane::{Stored, feed, offset, uses};
use crate::gpu::lower::Lowered;
use crate::gpu::pipelines::{Pipeline, Pipelines};
use crate::gpu::store::{Ref, Store, Tensor, Word};
use crate::ir::{E, Node};
use crate::plan::{Draft, Feed, Lane, Slot};

/// What carries a group out.
pub struct Group {
    /// What it is on.
    pub slots: Box<[Slot]>,
    /// What is fed to it.
    pub feeds: Box<[Feed]>,
    /// How it is computed.
    pub work: Work,
    /// Slots that are stored to, each with those that its values come from.
    pub stored: Box<[(u16, SmallVec<[u16; 8]>)]>,
}

/// How a group is computed.
pub enum Work {
    /// By kernels, none of which writes what another one touches.
    Launches(Box<[Launch]>),
    /// Within the kernels of the op before it, whose number this is.
    Behind(u32, Arc<Lowered>),
}

/// A kernel of a group.
pub struct Launch {
    /// It.
    pub pipeline: Arc<Pipeline>,
    /// Its buffers: each that of a slot.
    pub slots: SmallVec<[u16; 8]>,
    /// Its parameters.
    pub words: Box<[Word]>,
    /// Its workgroups.
    pub groups: Groups,
}

impl Group {
    /// Compiles a draft; `same` says whether two slots are in the same memory. `None` where a kernel cannot do it.
    pub fn of(
        draft: Draft<Slot, Feed>,
        same: &dyn Fn(Slot, Slot) -> bool,
        pipelines: &mut Pipelines,
    ) -> Option<Group> {
        let (mut launches, mut stored) = (Vec::new(), Vec::new());
        let slots = &draft.slots;
        // A buffer is named by the first slot in its memory.
        let buffer = |slot: u16| -> u32 {
            let first = slots.iter().position(|s| same(*s, slots[slot as usize]));
            first.unwrap_or(slot as usize) as u32
        };
        let (bundles, others) = Bundle::of(&draft.lanes, &buffer, pipelines.gpu.max_buffers);
        let bundled = bundles.iter().map(|bundle| bundle.kernel(slots, &buffer));
        let kernels = bundled.chain(others.into_iter().map(|lane| kernel_of(lane, slots, &buffer)));
        for kernel in kernels {
            let (kernel, stores) = kernel?;
            stored.extend(stores);
            launches.push(Launch {
                pipeline: pipelines.of(&kernel)?,
                slots: kernel.bufs.iter().filter_map(|buf| slot_of(buf.tensor)).collect(),
                words: kernel.words.into(),
                groups: kernel.groups,
            });
        }
        Some(Group {
            slots: draft.slots.into(),
            feeds: draft.params.into(),
            work: Work::Launches(launches.into()),
            stored: stored.into(),
        })
    }
}

impl Group {
    /// An op and its epilogue; `number` is the op's in the plan.
    pub fn behind(number: u32, epilogue: Epilogue<'_>, lowered: Lowered, feeds: &[Feed]) -> Group {
        Group {
            slots: epilogue.slots.into(),
            feeds: feeds.into(),
            work: Work::Behind(number, Arc::new(lowered)),
            stored: epilogue.stored.into(),
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.work {
            Work::Launches(all) => write!(f, "[{} kernels, {} tensors]", all.len(), self.slots.len()),
            Work::Behind(..) => write!(f, "[epilogue, {} tensors]", self.slots.len()),
        }
    }
}

/// The slot of a kernel's buffer.
fn slot_of(tensor: Ref) -> Option<u16> {
    match tensor {
        Ref::Input(slot) => Some(slot as u16),
        Ref::Fresh(_) | Ref::Temp(_) | Ref::Slot(_) | Ref::Faults => None,
    }
}

/// A lane's kernel, and what it stores from what.
fn kernel_of(lane: &Lane, slots: &[Slot], buffer: &dyn Fn(u16) -> u32) -> Option<(Kernel, Stored)> {
    let (used, stored) = uses(lane)?;
    let (sizes, strides) = lane.arranged();
    let mut k = Kernel::new("group");
    let mut tensors: Vec<Option<Tensor>> = Vec::new();
    for ((window, strides), used) in lane.windows.iter().zip(&strides).zip(&used) {
        tensors.push(used.map(|written| {
            let offset = Some(offset(slots[window.slot as usize], window.mem));
            k.window_from(offset, Ref::Input(buffer(window.slot)), window.mem, (&sizes, strides), written)
        }));
    }
    let mut fits = true;
    k.map(&sizes, |k, coords, number| {
        let stores = stores(k, lane, &tensors, coords, number);
        fits = stores.is_some();
        stores.unwrap_or_default()
    });
    fits.then_some((k, stored))
}

/// What the thread of an element stores.
fn stores(
    k: &mut Kernel,
    lane: &Lane,
    tensors: &[Option<Tensor>],
    coords: &[E],
    number: &E,
) -> Option<Vec<Store>> {
    let mut known = FxHashMap::default();
    let mut fed = FxHashMap::default();
    let mut stores = Vec::new();
    for (window, value) in lane.stores() {
        let value = value.with_leaves(&mut known, &mut |leaf| match leaf.node() {
            Node::Param(param) => Some(feed(k, &mut fed, *param, leaf.ty())),
            Node::Load { buf, .. } => Some(k.load_at(tensors[*buf as usize].as_ref()?, coords, number)),
            _ => None,
        })?;
        let t = tensors[window].as_ref()?;
        stores.push(match t.is_contiguous() {
            true => k.store_linear(t, number, value),
            false => k.store(t, coords, value),
        });
    }
    Some(stores)
}
