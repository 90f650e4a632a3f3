//! Collects kernels of the same structure into bundles.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::bundle::{Bundle, Place};
use crate::kernel::{Groups, Kernel, Skeleton, THREADS};
use crate::linear::{VECTOR, buffer, has_vectors, loads_of_stores, operands};
use crate::print::MAX_WORDS;
use crate::store::{Buf, Put, Ref, Store, Word};
use crate::structure::structure;
use tandem_executor::ir::{E, Mem, Node};

/// Maximum number of buffers of a bundle. It is limited because drivers compile the accesses to each of them.
pub const BUFFERS: usize = 128;

/// The properties of a device that bundles depend on.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of buffers of a kernel.
    pub buffers: u32,
    /// Whether buffers can have elements of 16 bits.
    pub int16: bool,
}

/// Replaces kernels that can share a kernel by bundles. No kernel may write memory that another kernel reads or writes.
pub fn bundled(kernels: Vec<Kernel>, limits: Limits) -> Vec<Kernel> {
    let mut found: Vec<Members> = Vec::new();
    let mut open: FxHashMap<Box<[u32]>, usize> = FxHashMap::default();
    for kernel in kernels {
        let Some(loads) = loads_of_member(&kernel, limits.int16) else {
            found.push(Members::new(kernel, Vec::new(), limits.int16));
            continue;
        };
        let at = open.entry(structure(&kernel)).or_insert(found.len());
        let kernel = match found.get_mut(*at) {
            Some(members) => members.add(kernel, limits),
            None => Some(kernel),
        };
        if let Some(kernel) = kernel {
            *at = found.len();
            found.push(Members::new(kernel, loads, limits.int16));
        }
    }
    found.into_iter().map(Members::joined).collect()
}

/// Maps of one structure that will share a kernel.
struct Members {
    all: Vec<Kernel>,
    /// Loads of the first member.
    loads: Vec<E>,
    /// Whether buffers can have elements of 16 bits.
    int16: bool,
    /// Buffers of all members, with whether they are written.
    bufs: FxHashMap<(Ref, Mem), bool>,
    /// Whether each parameter is the same for all members.
    shared: Vec<bool>,
}

impl Members {
    fn new(first: Kernel, loads: Vec<E>, int16: bool) -> Members {
        // Sizes that are equal by chance are not shared. Otherwise the kernel's text would depend on which sizes are
        // equal.
        let sharable = |word: &Word| !matches!(word, Word::Fixed(_) | Word::Offset(..));
        Members {
            bufs: first.bufs.iter().map(|buf| ((buf.tensor, buf.mem), buf.written)).collect(),
            shared: first.words.iter().map(sharable).collect(),
            loads,
            int16,
            all: vec![first],
        }
    }

    /// Adds a member. Returns the kernel if the bundle would get too many buffers or parameters.
    fn add(&mut self, kernel: Kernel, limits: Limits) -> Option<Kernel> {
        let words = self.all[0].words.iter().zip(&kernel.words).zip(&self.shared);
        let shared: Vec<bool> = words.map(|((a, b), shared)| *shared && a == b).collect();
        let known = |buf: &&Buf| self.bufs.get(&(buf.tensor, buf.mem)).copied();
        let same = kernel.bufs.iter().all(|buf| known(&buf).is_none_or(|written| written == buf.written));
        let bufs = self.bufs.len() + kernel.bufs.iter().filter(|buf| known(buf).is_none()).count();
        let fits = bufs <= BUFFERS.min(limits.buffers as usize)
            && Layout::of(self.all.len() + 1, &shared).total <= MAX_WORDS;
        if !same || !fits {
            return Some(kernel);
        }
        self.bufs.extend(kernel.bufs.iter().map(|buf| ((buf.tensor, buf.mem), buf.written)));
        self.shared = shared;
        self.all.push(kernel);
        None
    }

    /// The members as one kernel.
    fn joined(self) -> Kernel {
        let mut all = self.all;
        if all.len() == 1 {
            return all.swap_remove(0);
        }
        let layout = Layout::of(all.len(), &self.shared);
        let mut k = Kernel::new(all[0].label);
        let lanes = if has_lanes(&all[0], self.int16) { VECTOR } else { 1 };
        let (mut firsts, mut total) = (Vec::new(), 0);
        for member in &all {
            firsts.push(total as u32);
            total += u64::from(member.elements().unwrap_or(0).div_ceil(THREADS * lanes));
        }
        let shared = |word: usize| self.shared[word];
        k.words.extend(firsts[1..].iter().map(|first| Word::Fixed(*first)));
        k.words.extend((0..self.shared.len()).filter(|w| shared(*w)).map(|w| all[0].words[w]));
        k.words.resize(layout.own, Word::Fixed(0));
        for (member, first) in all.iter().zip(firsts) {
            k.words.push(Word::Fixed(first));
            k.words.extend((0..self.shared.len()).filter(|w| !shared(*w)).map(|w| member.words[w]));
            k.words.resize(k.words.len().next_multiple_of(4), Word::Fixed(0));
        }
        let bufs = all.iter().map(|member| member.bufs.iter().map(|buf| k.buffer(buf)).collect()).collect();
        k.groups = Groups::Linear(total);
        k.apart = true;
        if let Skeleton::Map { count, element, stores, .. } = all.swap_remove(0).skeleton {
            let (own, step) = (layout.own as u32, layout.step as u32);
            let (loads, places) = (self.loads, layout.places);
            k.skeleton =
                Skeleton::Bundle(Bundle { count, element, stores, loads, lanes, bufs, places, own, step });
        }
        k
    }
}

/// Layout of a bundle's parameters.
struct Layout {
    places: Box<[Place]>,
    own: usize,
    step: usize,
    total: usize,
}

impl Layout {
    /// The layout for a number of members, given which parameters of the map are shared.
    fn of(members: usize, shared: &[bool]) -> Layout {
        // The first workgroups of the members precede the parameters.
        let (mut common, mut own) = (members as u32 - 1, 1);
        let mut next = |shared: &bool| {
            let place = if *shared { Place::Shared(common) } else { Place::Own(own) };
            *(if *shared { &mut common } else { &mut own }) += 1;
            place
        };
        let places = shared.iter().map(&mut next).collect();
        let (common, step) = ((common as usize).next_multiple_of(4), (own as usize).next_multiple_of(4));
        Layout { places, own: common, step, total: common + members * step }
    }
}

/// Maximum number of elements of a member. Larger tensors gain nothing from a shared launch, and lose time by choosing
/// the member's buffers.
const MAX_ELEMENTS: u32 = 1 << 20;

/// The loads of a map, if it may be a member of a bundle: its stores must be unconditional, and its values must have no
/// loops, draws or faults.
fn loads_of_member(kernel: &Kernel, int16: bool) -> Option<Vec<E>> {
    let Skeleton::Map { stores, lanes, .. } = &kernel.skeleton else { return None };
    let plain = |s: &Store| s.put == Put::Assign && s.guard.is_none();
    let small = kernel.elements().is_some_and(|elements| elements <= MAX_ELEMENTS);
    if !small || !kernel.faults.is_empty() || kernel.first.is_some() || !stores.iter().all(plain) {
        return None;
    }
    // Adjacent elements of less than 32 bits share words, and one thread must store a whole word.
    let stores_words = *lanes != 1 && stores.iter().any(|s| kernel.bufs[s.buf as usize].mem.size() < 4);
    if stores_words && !has_lanes(kernel, int16) {
        return None;
    }
    loads(stores.iter().map(|s| &s.value))
}

/// Whether the elements of a map are loaded and stored as vectors.
fn has_lanes(kernel: &Kernel, int16: bool) -> bool {
    let Skeleton::Map { element, stores, lanes: VECTOR, .. } = &kernel.skeleton else { return false };
    let vectors = |buf: u32| has_vectors(&kernel.bufs[buf as usize], int16);
    loads_of_stores(stores, *element)
        .is_some_and(|each| each.iter().filter_map(buffer).chain(stores.iter().map(|s| s.buf)).all(vectors))
}

/// The loads of values without loops, draws and conditional loads, whose addresses are not loaded themselves.
fn loads<'v>(values: impl Iterator<Item = &'v E>) -> Option<Vec<E>> {
    let (mut found, mut visited) = (Vec::new(), FxHashSet::default());
    let mut rest: Vec<E> = values.cloned().collect();
    while let Some(e) = rest.pop() {
        if !visited.insert(e.address()) {
            continue;
        }
        match e.node() {
            Node::Fold { .. } | Node::Item(..) | Node::Call("random_part", _) => return None,
            Node::Load { guard: Some(_), .. } => return None,
            Node::Load { at, .. } if loads(std::iter::once(at))?.is_empty() => found.push(e),
            Node::Load { .. } => return None,
            _ => rest.extend(operands(&e)),
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::print::{Target, wgsl};
    use tandem_executor::ir::Ty;
    use wgpu::naga;

    /// Kernels that add a tensor of each size to another tensor of this size, and to a tensor of one element that all
    /// kernels share.
    fn sums(sizes: &[i64], mem: Mem, stride: i64) -> Vec<Kernel> {
        let sum = |(i, n): (usize, &i64)| {
            let mut k = Kernel::new("sum");
            let (x, y) = (Ref::Input(2 * i as u32), Ref::Input(2 * i as u32 + 1));
            let x = k.window(x, mem, &[*n], &[stride], true);
            let y = k.window(y, mem, &[*n], &[1], false);
            let one = k.window(Ref::Input(10_000), Mem::F32, &[], &[], false);
            let number = k.value(Ty::F32, |upper| Word::Number(3, 0, Ty::F32, upper));
            k.map(&[*n], |k, c, e| {
                let value = k.load_at(&x, c, e) + k.load_at(&y, c, e).cast(mem.ty()) * number.cast(mem.ty());
                let value = value + k.load(&one, &[]).cast(mem.ty());
                vec![if stride == 1 { k.store_linear(&x, e, value) } else { k.store(&x, c, value) }]
            });
            k
        };
        sizes.iter().enumerate().map(sum).collect()
    }

    fn validate(kernel: &Kernel, target: Target) {
        let text = wgsl(kernel, target).expect("the target has the kernel's types");
        let module = naga::front::wgsl::parse_str(&text);
        let module = module.unwrap_or_else(|e| panic!("{}", e.emit_to_string(&text)));
        let (flags, capabilities) = (naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all());
        if let Err(error) = naga::valid::Validator::new(flags, capabilities).validate(&module) {
            panic!("{}", error.emit_to_string(&text));
        }
    }

    const MANY: Limits = Limits { buffers: 1 << 20, int16: false };

    #[test]
    fn a_hundred_tensors_need_few_kernels() {
        let sizes: Vec<i64> = (2..=101).map(|i| i * i).collect();
        for (mem, stride) in [(Mem::F32, 1), (Mem::F32, 3), (Mem::I64, 1)] {
            let kernels = bundled(sums(&sizes, mem, stride), MANY);
            assert!(kernels.len() <= 4, "{} kernels of {mem:?}", kernels.len());
            kernels.iter().for_each(|kernel| validate(kernel, Target { int64: true, ..Target::default() }));
        }
    }

    #[test]
    fn each_element_is_computed_once() {
        let sizes = [5, 1024, 1025, 3000];
        let [kernel] = &bundled(sums(&sizes, Mem::F32, 1), MANY)[..] else { panic!("one kernel") };
        let Skeleton::Bundle(bundle) = &kernel.skeleton else { panic!("a bundle") };
        let own = |member: usize, word: u32| {
            kernel.words[(bundle.own + member as u32 * bundle.step + word) as usize]
        };
        let Node::Param(count) = bundle.count.node() else { panic!("a parameter") };
        let Place::Own(count) = bundle.places[*count as usize] else { panic!("sizes are not shared") };
        let mut first = 0;
        for (member, n) in sizes.iter().enumerate() {
            assert_eq!((own(member, 0), own(member, count)), (Word::Fixed(first), Word::Fixed(*n as u32)));
            first += (*n as u32).div_ceil(1024);
            if member + 1 < sizes.len() {
                assert_eq!(kernel.words[member], Word::Fixed(first));
            }
        }
        assert_eq!(kernel.groups, Groups::Linear(u64::from(first)));
        assert!(bundle.places.iter().any(|place| matches!(place, Place::Shared(_))), "the number is shared");
        assert!(bundle.shared(2).is_some() && bundle.shared(0).is_none());
    }

    #[test]
    fn limits_hold() {
        let sizes = [7; 20];
        let kernels = bundled(sums(&sizes, Mem::F32, 1), Limits { buffers: 8, int16: false });
        assert!(kernels.iter().all(|k| k.bufs.len() <= 8 && k.words.len() <= MAX_WORDS));
        assert_eq!(kernels.len(), 7);
        // Elements of a byte share words, which several threads would write.
        assert_eq!(bundled(sums(&sizes, Mem::U8, 1), MANY).len(), 20);
        assert_eq!(bundled(sums(&sizes, Mem::F16, 1), Limits { int16: true, ..MANY }).len(), 1);
    }
}
