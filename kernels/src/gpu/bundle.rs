//! Bundles: small lanes of a group that compute the same function share a kernel. An optimizer with many small
//! tensors needs one launch for several of them.

use rustc_hash::FxHashMap;

use crate::gpu::kernel::Kernel;
use crate::gpu::lane::{Stored, feed, offset, uses};
use crate::gpu::store::{Ref, Store, Tensor};
use crate::ir::{E, Known, Mem, Node};
use crate::plan::{Lane, Slot};

/// Maximum number of elements of a lane that may share a kernel.
const SMALL: i64 = 1 << 16;
/// Maximum number of buffers of a bundle's kernel.
const BUFFERS: u32 = 32;

/// A lane of few elements with at most one dimension.
struct Small<'d> {
    lane: &'d Lane,
    used: Vec<Option<bool>>,
    stored: Stored,
    numel: i64,
    /// Stride in elements, by window.
    steps: Vec<i64>,
}

impl<'d> Small<'d> {
    fn of(lane: &'d Lane) -> Option<Small<'d>> {
        let (sizes, strides) = lane.arranged();
        let numel = sizes.iter().product();
        let (used, stored) = uses(lane)?;
        let mut windows = lane.windows.iter().zip(&used);
        // Elements of less than 32 bits would share words with elements that other threads write.
        let whole = windows.all(|(w, used)| *used != Some(true) || w.mem.size() >= 4);
        let steps = strides.iter().map(|strides| strides.first().copied().unwrap_or(0)).collect();
        let fits = whole && sizes.len() <= 1 && (1..=SMALL).contains(&numel);
        fits.then_some(Small { lane, used, stored, numel, steps })
    }

    /// Whether both lanes compute the same function, on windows of the same formats that are read and written
    /// alike.
    fn is_like(&self, other: &Small<'_>) -> bool {
        let memories = |s: &Small<'_>| s.lane.windows.iter().map(|w| w.mem).collect::<Vec<_>>();
        self.used == other.used
            && memories(self) == memories(other)
            && joined(&[self, other], &mut |leaves| same_window(leaves).then(|| leaves[0].clone())).is_some()
    }

    /// The buffers that the lane uses, with their memory formats.
    fn buffers(&self, buffer: &dyn Fn(u16) -> u32) -> Vec<(u32, Mem)> {
        let windows = self.lane.windows.iter().zip(&self.used).filter(|(_, used)| used.is_some());
        windows.map(|(w, _)| (buffer(w.slot), w.mem)).collect()
    }
}

/// Whether all leaves are loads from the window with the same index, or none is a load.
fn same_window(leaves: &[E]) -> bool {
    let window = |e: &E| match e.node() {
        Node::Load { buf, .. } => Some(*buf),
        _ => None,
    };
    leaves.iter().all(|e| window(e) == window(&leaves[0]))
}

/// The stores of several lanes as one list: the index of each stored window, and an expression that `leaf` makes
/// valid for all lanes.
fn joined(lanes: &[&Small<'_>], leaf: &mut dyn FnMut(&[E]) -> Option<E>) -> Option<Vec<(usize, E)>> {
    let mut known = Known::default();
    let all: Vec<Vec<(usize, &E)>> = lanes.iter().map(|s| s.lane.stores().collect()).collect();
    let windows = |stores: &[(usize, &E)]| -> Vec<usize> { stores.iter().map(|s| s.0).collect() };
    let numbers = windows(all.first()?);
    if all.iter().any(|stores| windows(stores) != numbers) {
        return None;
    }
    let value = |(at, window): (usize, usize)| {
        let values: Vec<E> = all.iter().map(|stores| stores[at].1.clone()).collect();
        Some((window, E::joined(&values, &mut known, leaf)?))
    };
    numbers.into_iter().enumerate().map(value).collect()
}

/// Lanes that share a kernel.
#[derive(Default)]
pub struct Bundle<'d> {
    lanes: Vec<Small<'d>>,
    buffers: Vec<(u32, Mem)>,
}

impl<'d> Bundle<'d> {
    /// Groups lanes into bundles; the second result is the lanes left over. `buffer` maps slots in the same memory
    /// to one number. A kernel gets at most `most` buffers.
    pub fn of(lanes: &'d [Lane], buffer: &dyn Fn(u16) -> u32, most: u32) -> (Vec<Bundle<'d>>, Vec<&'d Lane>) {
        let most = most.min(BUFFERS) as usize;
        let (mut full, mut open): (Vec<Bundle<'d>>, Vec<Bundle<'d>>) = (Vec::new(), Vec::new());
        let mut others = Vec::new();
        for lane in lanes {
            let Some(small) = Small::of(lane) else {
                others.push(lane);
                continue;
            };
            let at = open.iter().position(|bundle| bundle.lanes[0].is_like(&small)).unwrap_or_else(|| {
                open.push(Bundle::default());
                open.len() - 1
            });
            let buffers = small.buffers(buffer);
            let new = buffers.iter().filter(|b| !open[at].buffers.contains(b)).count();
            if open[at].buffers.len() + new > most {
                full.push(std::mem::take(&mut open[at]));
            }
            for buffer in buffers {
                if !open[at].buffers.contains(&buffer) {
                    open[at].buffers.push(buffer);
                }
            }
            open[at].lanes.push(small);
        }
        full.append(&mut open);
        let (bundles, single): (Vec<_>, Vec<_>) = full.into_iter().partition(|b| b.lanes.len() > 1);
        others.extend(single.iter().flat_map(|b| &b.lanes).map(|s| s.lane));
        (bundles, others)
    }

    /// The kernel of the bundle, and the slots that it stores to with the slots that the values depend on. The
    /// kernel numbers the elements of the first lane first, then those of the second lane, and so on.
    pub fn kernel(&self, slots: &[Slot], buffer: &dyn Fn(u16) -> u32) -> Option<(Kernel, Stored)> {
        let mut k = Kernel::new("bundle");
        let mut window = |lane: &Small<'_>, number: usize| {
            let (w, step) = (&lane.lane.windows[number], lane.steps[number]);
            let offset = Some(offset(slots[w.slot as usize], w.mem));
            let tensor = Ref::Input(buffer(w.slot));
            Some(k.window_from(offset, tensor, w.mem, (&[lane.numel], &[step]), lane.used[number]?))
        };
        let tensors: Vec<Vec<Option<Tensor>>> = self
            .lanes
            .iter()
            .map(|lane| (0..lane.steps.len()).map(|number| window(lane, number)).collect())
            .collect();
        let mut ends = vec![0];
        ends.extend(self.lanes.iter().scan(0, |end, lane| {
            *end += lane.numel;
            Some(*end)
        }));
        let bounds: Vec<E> = ends.iter().map(|end| k.size(*end)).collect();
        let mut fits = true;
        k.map(&ends[ends.len() - 1..], |k, _, number| {
            let places: Vec<Member> =
                bounds.windows(2).map(|b| Member::between(&b[0], &b[1], number)).collect();
            let stores = self.stores(k, &tensors, &places);
            fits = stores.is_some();
            stores.unwrap_or_default()
        });
        let stored = self.lanes.iter().flat_map(|lane| lane.stored.iter().cloned()).collect();
        fits.then_some((k, stored))
    }

    /// The stores of a thread. Those of each lane are guarded by whether the thread's element is in that lane.
    fn stores(
        &self,
        k: &mut Kernel,
        tensors: &[Vec<Option<Tensor>>],
        places: &[Member],
    ) -> Option<Vec<Store>> {
        let lanes: Vec<&Small<'_>> = self.lanes.iter().collect();
        let mut fed = FxHashMap::default();
        let values = joined(&lanes, &mut |leaves| match leaves[0].node() {
            Node::Load { buf, .. } => self.load(k, *buf as usize, tensors, places),
            _ => {
                let mut value = |leaf: &E| match leaf.node() {
                    Node::Param(param) => Some(feed(k, &mut fed, *param, leaf.ty())),
                    _ => None,
                };
                let values = leaves.iter().map(&mut value).collect::<Option<Vec<E>>>()?;
                let (last, others) = values.split_last()?;
                if others.iter().all(|value| value.address() == last.address()) {
                    return Some(last.clone());
                }
                let pick = |rest, (value, place): (&E, &Member)| place.inside.select(value, rest);
                Some(others.iter().zip(places).rev().fold(last.clone(), pick))
            }
        })?;
        let store = |(window, value): &(usize, E), tensors: &[Option<Tensor>], place: &Member| {
            let at = std::slice::from_ref(&place.at);
            let store = k.store(tensors[*window].as_ref()?, at, value.clone());
            Some(Store { guard: Some(place.inside.clone()), ..store })
        };
        let each = tensors.iter().zip(places);
        each.flat_map(|(tensors, place)| values.iter().map(move |v| (v, tensors, place)))
            .map(|(value, tensors, place)| store(value, tensors, place))
            .collect()
    }

    /// The element that a thread loads from the window with this index of its lane.
    fn load(
        &self,
        k: &Kernel,
        window: usize,
        tensors: &[Vec<Option<Tensor>>],
        places: &[Member],
    ) -> Option<E> {
        let tensor = |lane: usize| tensors[lane][window].as_ref();
        let at = |lane: usize| std::slice::from_ref(&places[lane].at);
        let slot = |lane: &Small<'_>| lane.lane.windows[window].slot;
        if self.lanes.iter().all(|lane| lane.steps[window] == 0 && slot(lane) == slot(&self.lanes[0])) {
            return Some(k.load(tensor(0)?, at(0)));
        }
        let nothing = E::lit(tensor(0)?.mem.ty(), 0.0);
        let pick = |rest: E, lane: usize| {
            Some(k.load_if(tensor(lane)?, at(lane), places[lane].inside.clone(), rest))
        };
        (0..self.lanes.len()).rev().try_fold(nothing, pick)
    }
}

/// Position of a thread's element in a lane, and whether the lane has that element.
struct Member {
    at: E,
    inside: E,
}

impl Member {
    fn between(begin: &E, end: &E, number: &E) -> Member {
        Member { at: number - begin, inside: number.ge(begin).and(number.lt(end)) }
    }
}
