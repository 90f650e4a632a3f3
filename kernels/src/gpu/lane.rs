//! What the kernels of lanes have in common: what they use, and how parameters are fed.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::gpu::kernel::Kernel;
use crate::gpu::store::Word;
use crate::ir::{E, Mem, Node, Ty};
use crate::plan::{Lane, Slot};

/// Slots that are stored to, each with those that its values come from.
pub type Stored = Vec<(u16, SmallVec<[u16; 8]>)>;

/// The windows that a lane uses, each with whether it is written; and what it stores from what.
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

/// Elements before a window, from the beginning of its storage.
pub fn offset(slot: Slot, mem: Mem) -> Word {
    Word::Fixed(match slot {
        Slot::Storage(_, bytes) => bytes / i64::from(mem.size()),
        Slot::Host(_) => 0,
    } as u32)
}

/// A parameter, once in each type.
pub fn feed(k: &mut Kernel, fed: &mut FxHashMap<(u32, Ty), E>, param: u32, ty: Ty) -> E {
    let value = || k.value(ty, |upper| Word::Feed(param, ty, upper));
    fed.entry((param, ty)).or_insert_with(value).clone()
}
