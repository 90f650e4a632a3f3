//! Groups compiled to kernels that keep intermediate values in registers.

use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::bundling::bundled;
use crate::epilogue::Epilogue;
use crate::kernel::{Groups, Kernel};
use crate::lane::{Stored, feed, offset, uses};
use crate::lower::Lowered;
use crate::pipelines::{Pipeline, Pipelines};
use crate::store::{Ref, Store, Tensor, Word};
use crate::walk::Put;
use tandem_executor::ir::{E, Node};
use tandem_executor::plan::{Draft, Feed, Lane, Slot};
use tandem_executor::shapes::View;

/// A compiled group.
pub struct KernelGroup {
    /// Memory that the group reads and writes.
    pub slots: Box<[Slot]>,
    /// Sources of the group's parameters.
    pub feeds: Box<[Feed]>,
    /// Kernels that compute the group.
    pub work: Work,
    /// Slots that are stored to, each with the slots that its values depend on.
    pub stored: Box<[(u16, SmallVec<[u16; 8]>)]>,
}

/// Kernels that compute a group.
pub enum Work {
    /// Kernels of the group alone. No kernel writes memory that another kernel reads or writes.
    Launches(Box<[Launch]>),
    /// The kernels of the op before the group, extended by an epilogue. The first field is that op's index in the
    /// plan.
    Epilogue(u32, Arc<Lowered>),
}

/// Launch of one kernel of a group.
pub struct Launch {
    /// Compiled kernel.
    pub pipeline: Arc<Pipeline>,
    /// Slot of each of the kernel's buffers, in binding order.
    pub slots: SmallVec<[u16; 8]>,
    /// Parameters.
    pub words: Box<[Word]>,
    /// Number of workgroups.
    pub groups: Groups,
}

impl KernelGroup {
    /// Compiles a draft. `same` returns whether two slots are in the same memory. Returns `None` if no kernel can
    /// compute the draft.
    pub fn of(
        draft: Draft<Slot, Feed>,
        same: &dyn Fn(Slot, Slot) -> bool,
        pipelines: &mut Pipelines,
    ) -> Option<KernelGroup> {
        let (mut launches, mut stored) = (Vec::new(), Vec::new());
        let slots = &draft.slots;
        // Slots in the same memory share a buffer, which is numbered by the first of them.
        let buffer = |slot: u16| -> u32 {
            let first = slots.iter().position(|s| same(*s, slots[slot as usize]));
            first.unwrap_or(slot as usize) as u32
        };
        let mut kernels = Vec::new();
        // Without stores, a lane has nothing to compute.
        for lane in draft.lanes.iter().filter(|lane| lane.stores().next().is_some()) {
            let (kernel, stores) = kernel_of(lane, slots, &buffer)?;
            kernels.push(kernel);
            stored.extend(stores);
        }
        for kernel in bundled(kernels, pipelines.gpu.bundles()) {
            launches.push(Launch {
                pipeline: pipelines.of(&kernel)?,
                slots: kernel.bufs.iter().filter_map(|buf| slot_of(buf.tensor)).collect(),
                words: kernel.words.into(),
                groups: kernel.groups,
            });
        }
        Some(KernelGroup {
            slots: draft.slots.into(),
            feeds: draft.params.into(),
            work: Work::Launches(launches.into()),
            stored: stored.into(),
        })
    }
}

impl KernelGroup {
    /// A group computed as the epilogue of an op; `number` is the op's index in the plan.
    pub fn of_epilogue(number: u32, epilogue: Epilogue<'_>, lowered: Lowered, feeds: &[Feed]) -> KernelGroup {
        KernelGroup {
            slots: epilogue.slots.into(),
            feeds: feeds.into(),
            work: Work::Epilogue(number, Arc::new(lowered)),
            stored: epilogue.stored.into(),
        }
    }
}

impl fmt::Display for KernelGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.work {
            Work::Launches(all) => write!(f, "[{} kernels, {} tensors]", all.len(), self.slots.len()),
            Work::Epilogue(..) => write!(f, "[epilogue, {} tensors]", self.slots.len()),
        }
    }
}

/// Slot that a kernel's buffer is bound to.
fn slot_of(tensor: Ref) -> Option<u16> {
    match tensor {
        Ref::Input(slot) => Some(slot as u16),
        Ref::NewStorage(_) | Ref::Temp(_) | Ref::Slot(_) | Ref::Faults => None,
    }
}

/// Kernel of one lane, and the slots that the lane stores to, each with the slots that the stored values depend on.
fn kernel_of(lane: &Lane, slots: &[Slot], buffer: &dyn Fn(u16) -> u32) -> Option<(Kernel, Stored)> {
    let (used, stored) = uses(lane)?;
    let (sizes, strides) = lane.arranged();
    let mut k = Kernel::new("group");
    let mut tensors: Vec<Option<Tensor>> = Vec::new();
    for ((window, strides), used) in lane.windows.iter().zip(&strides).zip(&used) {
        tensors.push(used.map(|written| {
            let offset = Some(offset(slots[window.slot as usize], window.mem));
            let view = View { sizes: &sizes, strides };
            k.window_from(offset, Ref::Input(buffer(window.slot)), window.mem, view, written)
        }));
    }
    let mut fits = true;
    let of = |written: bool| -> Vec<&Tensor> {
        let all = tensors.iter().zip(&used).filter(|(_, used)| **used == Some(written));
        all.filter_map(|(t, _)| t.as_ref()).collect()
    };
    k.walk(&sizes, &of(true), &of(false), |k, coords, number, put| {
        let stores = stores(k, lane, &tensors, coords, number, put);
        fits = stores.is_some();
        stores.unwrap_or_default()
    });
    fits.then_some((k, stored))
}

/// Stores of the thread that computes one element of a lane.
fn stores(
    k: &mut Kernel,
    lane: &Lane,
    tensors: &[Option<Tensor>],
    coords: &[E],
    number: &E,
    put: Put<'_>,
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
        stores.push(put(k, t, coords, number, value));
    }
    Some(stores)
}
