//! Functions shared by the kernels of lanes: which windows a lane uses, and how parameters are added.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::kernel::Kernel;
use crate::store::Word;
use tandem_executor::ir::{E, Mem, Node, Ty};
use tandem_executor::plan::{Lane, Slot};

/// Slots that are stored to, each with the slots that its values depend on.
pub type Stored = Vec<(u16, SmallVec<[u16; 8]>)>;

/// The windows that a lane uses, and the slots that it stores to. For each window: whether the lane writes it; `None`
/// if the lane does not use it. For each slot: the slots that the stored values depend on.
pub fn uses(lane: &Lane) -> Option<(Vec<Option<bool>>, Stored)> {
    let mut stored = Stored::new();
    let mut used: Vec<Option<bool>> = vec![None; lane.windows.len()];
    for (number, value) in lane.stores() {
        let mut from = SmallVec::new();
        value.with_leaves(&mut FxHashMap::default(), &mut |leaf| {
            if let Node::Load { buf, .. } = leaf.node() {
                used[*buf as usize].get_or_insert(false);
                from.push(lane.windows[*buf as usize].slot);
            }
            Some(leaf.clone())
        })?;
        stored.push((lane.windows[number].slot, from));
        used[number] = Some(true);
    }
    Some((used, stored))
}

/// Offset of a window in its storage, in elements.
pub fn offset(slot: Slot, mem: Mem) -> Word {
    Word::Fixed(match slot {
        Slot::Storage(_, bytes) => bytes / i64::from(mem.size()),
        Slot::Host(_) => 0,
    } as u32)
}

/// A group's parameter as a value of type `ty`. It is added to the kernel on first use.
pub fn feed(k: &mut Kernel, fed: &mut FxHashMap<(u32, Ty), E>, param: u32, ty: Ty) -> E {
    let value = || k.value(ty, |upper| Word::Feed(param, ty, upper));
    fed.entry((param, ty)).or_insert_with(value).clone()
}
