//! Epilogues: a lane of a group that is computed within the kernels of the preceding op.

use rustc_hash::{FxHashMap, FxHashSet};
use tandem_tracegraph::node::OutSpec;

use crate::contract::Side;
use crate::kernel::{Kernel, Skeleton};
use crate::lane::{Stored, feed, offset, uses};
use crate::linear::{buffer, operands};
use crate::store::{Put, Ref, Store, Tensor};
use tandem_executor::ir::{E, Mem, Node, Ty, Un};
use tandem_executor::plan::{Before, Draft, Feed, Held, Lane, Slot};
use tandem_executor::shapes::{Dims, View};

/// Maximum [`weight`] of an epilogue that is printed for each matrix of a subgroup. Without a limit, gelu written as
/// nine operators that store their results was inlined 16 times, and the first steps of a GPT-2 in bfloat16 took more
/// than half a minute on an H200.
const MAX_COPIED: usize = 80;

/// Whether a kernel is a contraction of halves, which has a copy of its epilogue for each matrix on adapters with matrix
/// units.
fn has_copies(k: &Kernel, skeleton: &Skeleton) -> bool {
    let Skeleton::Contract(contract) = skeleton else { return false };
    let is_half = |side: &Side| buffer(&side.value).is_some_and(|buf| k.bufs[buf as usize].mem.is_half());
    contract.sides.iter().all(is_half)
}

/// Approximate number of instructions of some stores.
fn weight(stores: &[Store]) -> usize {
    let (mut visited, mut weight) = (FxHashSet::default(), 8 * stores.len());
    let mut rest: Vec<E> = stores.iter().map(|s| s.value.clone()).collect();
    while let Some(e) = rest.pop() {
        if visited.insert(e.address()) {
            weight += match e.node() {
                Node::Call("pow_", _) => 150,
                Node::Call("round_bf16", _) => 6,
                Node::Call(..) => 30,
                _ => 1,
            };
            rest.extend(operands(&e));
        }
    }
    weight
}

/// A lane that is computed where the kernels of the preceding op store the elements of that op's first new tensor. Each
/// other tensor of the lane has the same layout as the new tensor, or a single element.
pub struct Epilogue<'d> {
    pub(super) lane: &'d Lane,
    pub(super) slots: &'d [Slot],
    /// Index of the window on the op's new tensor.
    made: usize,
    used: Vec<Option<bool>>,
    pub(super) stored: Stored,
    /// Whether each window has a single element.
    single: Vec<bool>,
}

impl<'d> Epilogue<'d> {
    /// The draft as an epilogue of the op before it, or `None` if it cannot be one.
    pub fn of(draft: &'d Draft<Slot, Feed>, before: &Before<'_, '_, '_>) -> Option<Epilogue<'d>> {
        let [lane] = &draft.lanes[..] else { return None };
        let made = Slot::Storage(before.made.start, 0);
        let window = lane.windows.iter().position(|w| draft.slots[w.slot as usize] == made)?;
        let (used, stored) = uses(lane)?;
        used[window]?;
        let outputs = &before.op.variant.outputs;
        let numel = match outputs.outs.first()? {
            OutSpec::NewStorage { storage: 0, meta, offset: 0 } => meta.numel(),
            _ => return None,
        };
        // The lane's other storages must exist before the op runs, and the lane must not write what the op reads.
        let mut slots = lane.windows.iter().zip(&used).filter_map(|(w, used)| {
            let Slot::Storage(place, _) = draft.slots[w.slot as usize] else { return None };
            (draft.slots[w.slot as usize] != made).then_some((place, (*used)?))
        });
        if slots
            .any(|(place, written)| before.made.contains(&place) || written && before.given.contains(&place))
        {
            return None;
        }
        let (sizes, strides) = lane.arranged();
        let [n] = sizes[..] else { return None };
        let plain = |((w, strides), used): ((&Held, &Dims), &Option<bool>)| {
            let stored = w.mem.size() >= 4 || w.mem.is_half() || *used != Some(true);
            used.is_none() || stored && (strides[0] == 1 || strides[0] == 0 && *used == Some(false))
        };
        let all = lane.windows.iter().zip(&strides).zip(&used).all(plain);
        if n != numel || strides[window][0] != 1 || !all {
            return None;
        }
        let single = strides.iter().map(|s| s[0] == 0).collect();
        Some(Epilogue { lane, slots: &draft.slots, made: window, used, stored, single })
    }

    /// Changes a kernel's stores to the op's first new tensor into the stores of the epilogue. Returns whether the
    /// kernel has such stores; `None` if they cannot be changed.
    pub fn join(&self, k: &mut Kernel) -> Option<bool> {
        let own = |k: &Kernel, buf: u32| k.bufs[buf as usize].tensor == Ref::NewStorage(0);
        if !(0..k.bufs.len()).any(|buf| k.bufs[buf].written && own(k, buf as u32)) {
            return Some(false);
        }
        let mut skeleton = std::mem::replace(&mut k.skeleton, Skeleton::empty());
        let mut stages = skeleton.stores()?;
        stages.retain(|stores| stores.iter().any(|s| own(k, s.buf)));
        let [stores] = &mut stages[..] else { return None };
        let mut all = Vec::new();
        for store in stores.drain(..) {
            match own(k, store.buf) {
                true if store.put == Put::Assign => all.extend(self.stores(k, &store)?),
                true => return None,
                false => all.push(store),
            }
        }
        let weight = weight(&all);
        **stores = all;
        if has_copies(k, &skeleton) && weight > MAX_COPIED {
            return None;
        }
        k.skeleton = skeleton;
        Some(true)
    }

    /// The stores that replace the op's store of one element.
    fn stores(&self, k: &mut Kernel, of: &Store) -> Option<Vec<Store>> {
        let mut tensors: Vec<Option<Tensor>> = Vec::new();
        for (number, (window, used)) in self.lane.windows.iter().zip(&self.used).enumerate() {
            tensors.push(used.filter(|_| number != self.made).map(|written| {
                let offset = Some(offset(self.slots[window.slot as usize], window.mem));
                k.window_from(offset, Ref::Slot(window.slot), window.mem, View::default(), written)
            }));
        }
        let address = |number: usize| {
            let offset = tensors[number].as_ref()?.offset.clone()?;
            Some(if self.single[number] { offset } else { offset + &of.at })
        };
        // Kernels that only move elements treat 32-bit floats as integers.
        let (from, to) = (k.bufs[of.buf as usize].mem, self.lane.windows[self.made].mem);
        let element = match (from, to) {
            _ if from == to => of.value.rounded(Some(to)),
            (Mem::I32, Mem::F32) => E::un(Un::FromBits, of.value.cast(Ty::U32)),
            _ => return None,
        };
        let (mut known, mut fed) = (FxHashMap::default(), FxHashMap::default());
        let mut stores = Vec::new();
        let kept = self.lane.is_kept(self.made);
        if kept && self.used[self.made] == Some(false) {
            stores.push(of.clone());
        }
        for (number, value) in self.lane.stores() {
            let value = value.with_leaves(&mut known, &mut |leaf| match leaf.node() {
                Node::Param(param) => Some(feed(k, &mut fed, *param, leaf.ty())),
                Node::Load { buf, .. } if *buf as usize == self.made => Some(element.clone()),
                Node::Load { buf, .. } => {
                    let t = tensors[*buf as usize].as_ref()?;
                    Some(E::load(t.mem, t.buf, address(*buf as usize)?, None))
                }
                _ => None,
            })?;
            stores.push(match tensors[number].as_ref() {
                None if from == to => Store { value, ..of.clone() },
                None => return None,
                Some(t) => Store { buf: t.buf, at: address(number)?, value, ..of.clone() },
            });
        }
        Some(stores)
    }
}
