//! Groups: drafts as kernels, whose intermediate values stay in registers.

use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use tandem_tracegraph::node::OutSpec;

use crate::gpu::bundle::Bundle;
use crate::gpu::kernel::{Groups, Kernel, Put, Ref, Skeleton, Store, Tensor, Word};
use crate::gpu::lower::Lowered;
use crate::gpu::pipelines::{Pipeline, Pipelines};
use crate::ir::{E, Mem, Node, Ty, Un};
use crate::plan::{Before, Draft, Feed, Held, Lane, Slot};
use crate::shapes::Dims;

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

impl fmt::Debug for Group {
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

/// Slots that are stored to, each with those that its values come from.
pub(super) type Stored = Vec<(u16, SmallVec<[u16; 8]>)>;

/// The windows that a lane uses, each with whether it is written; and what it stores from what.
pub(super) fn uses(lane: &Lane) -> Option<(Vec<Option<bool>>, Stored)> {
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
pub(super) fn offset(slot: Slot, mem: Mem) -> Word {
    Word::Fixed(match slot {
        Slot::Storage(_, bytes) => bytes / i64::from(mem.size()),
        Slot::Host(_) => 0,
    } as u32)
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

/// A parameter, once in each type.
pub(super) fn feed(k: &mut Kernel, fed: &mut FxHashMap<(u32, Ty), E>, param: u32, ty: Ty) -> E {
    let value = || k.value(ty, |upper| Word::Feed(param, ty, upper));
    fed.entry((param, ty)).or_insert_with(value).clone()
}

/// A lane that is computed where the kernels of the op before it store the elements of its first new tensor. All its
/// tensors have that one's layout, or one element.
pub struct Epilogue<'d> {
    lane: &'d Lane,
    slots: &'d [Slot],
    /// The window on the op's tensor.
    made: usize,
    used: Vec<Option<bool>>,
    stored: Stored,
    /// Whether each window has one element.
    single: Vec<bool>,
}

impl<'d> Epilogue<'d> {
    /// The draft as an epilogue of the op before it; `None` where it is none.
    pub fn of(draft: &'d Draft<Slot, Feed>, before: &Before<'_, '_, '_>) -> Option<Epilogue<'d>> {
        let [lane] = &draft.lanes[..] else { return None };
        let made = Slot::Storage(before.made.start, 0);
        let window = lane.windows.iter().position(|w| draft.slots[w.slot as usize] == made)?;
        let (used, stored) = uses(lane)?;
        used[window]?;
        let outputs = &before.op.variant.outputs;
        let numel = match outputs.outs.first()? {
            OutSpec::Fresh { storage: 0, meta, offset: 0 } => meta.numel(),
            _ => return None,
        };
        // What it is on is there before the op runs, and the op does not read what it writes.
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
            let exact = w.mem.is_exact() && (*used != Some(true) || w.mem.size() >= 4);
            used.is_none() || exact && (strides[0] == 1 || strides[0] == 0 && *used == Some(false))
        };
        let all = lane.windows.iter().zip(&strides).zip(&used).all(plain);
        if n != numel || strides[window][0] != 1 || !all {
            return None;
        }
        let single = strides.iter().map(|s| s[0] == 0).collect();
        Some(Epilogue { lane, slots: &draft.slots, made: window, used, stored, single })
    }

    /// The group that the op and this are.
    pub fn group(self, number: u32, lowered: Lowered, feeds: &[Feed]) -> Group {
        Group {
            slots: self.slots.into(),
            feeds: feeds.into(),
            work: Work::Behind(number, Arc::new(lowered)),
            stored: self.stored.into(),
        }
    }

    /// Makes a kernel store what this computes where it stores the op's elements; whether it does that. `None` where it
    /// cannot.
    pub fn join(&self, k: &mut Kernel) -> Option<bool> {
        let own = |k: &Kernel, buf: u32| k.bufs[buf as usize].tensor == Ref::Fresh(0);
        if !(0..k.bufs.len()).any(|buf| k.bufs[buf].written && own(k, buf as u32)) {
            return Some(false);
        }
        let mut skeleton = std::mem::replace(&mut k.skeleton, Skeleton::Raw(String::new()));
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
        **stores = all;
        k.skeleton = skeleton;
        Some(true)
    }

    /// What is stored instead of an element of the op.
    fn stores(&self, k: &mut Kernel, of: &Store) -> Option<Vec<Store>> {
        let mut tensors: Vec<Option<Tensor>> = Vec::new();
        for (number, (window, used)) in self.lane.windows.iter().zip(&self.used).enumerate() {
            tensors.push(used.filter(|_| number != self.made).map(|written| {
                let offset = Some(offset(self.slots[window.slot as usize], window.mem));
                k.window_from(offset, Ref::Slot(window.slot), window.mem, (&[], &[]), written)
            }));
        }
        let address = |number: usize| {
            let offset = tensors[number].as_ref()?.offset.clone()?;
            Some(if self.single[number] { offset } else { offset + &of.at })
        };
        // Operators that move elements take them for whole numbers.
        let element = match (k.bufs[of.buf as usize].mem, self.lane.windows[self.made].mem) {
            (from, to) if from == to => of.value.clone(),
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
                None if element.address() == of.value.address() => Store { value, ..of.clone() },
                None => return None,
                Some(t) => Store { buf: t.buf, at: address(number)?, value, ..of.clone() },
            });
        }
        Some(stores)
    }
}
