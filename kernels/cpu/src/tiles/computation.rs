//! Compiled computations of the CPU executor: groups of expressions, groups that end in sums, and kernels.

use std::fmt;

use smallvec::SmallVec;

use crate::channels_last::{OnChannelsLast, Order, Planes};
use crate::kernels;
use crate::kernels::Kernel;
use crate::tiles::group::TileGroup;
use crate::tiles::summed::Summed;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::{Param, TensorGeometry};
use tandem_executor::plan::{Draft, Ending, Feed, Slot};
use tandem_executor::shapes::channels_last;

/// A computation on windows. `S` identifies where a window begins, `P` where a parameter comes from.
#[derive(Debug)]
pub struct Computation<S, P> {
    /// Start of each window.
    pub slots: Box<[S]>,
    /// Source of each parameter.
    pub params: Box<[P]>,
    /// Code of the computation.
    pub work: Work,
    /// The form for channels-last contents.
    pub on_channels_last: Option<Box<OnChannelsLast<Work>>>,
}

/// Code of a [`Computation`].
pub enum Work {
    /// Expressions of elements.
    Tiles(TileGroup),
    /// Expressions of elements that end in sums over rows.
    Summed(Summed),
    /// Kernel of an operator.
    Kernel(kernels::Work),
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
    /// Compiles a draft of one lane that ends in sums of the lane's values. Returns the draft if [`Summed::compile`]
    /// refuses it.
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
    /// Compiles the expressions of a draft. `aliases` returns whether two slots may share memory.
    pub fn compile(draft: Draft<S, P>, aliases: impl Fn(S, S) -> bool) -> Option<Computation<S, P>> {
        let group = TileGroup::compile(&draft, aliases)?;
        Some(Computation::of_draft(draft, Work::Tiles(group)))
    }
}

impl<S, P> Computation<S, P> {
    fn of_draft(draft: Draft<S, P>, work: Work) -> Computation<S, P> {
        Computation { slots: draft.slots.into(), params: draft.params.into(), work, on_channels_last: None }
    }

    /// Wraps a kernel, with its windows and parameters mapped to `S` and `P`.
    pub fn of(
        kernel: Kernel,
        slot: impl Fn(&TensorGeometry) -> S,
        param: impl Fn(Param) -> P,
    ) -> Computation<S, P> {
        let Kernel { windows, params, work, on_channels_last } = kernel;
        let on_channels_last = on_channels_last.map(|OnChannelsLast { planes, preferred, work }| {
            Box::new(OnChannelsLast { planes, preferred, work: Work::Kernel(work) })
        });
        let slots = windows.iter().map(slot).collect();
        let params = params.into_iter().map(param).collect();
        Computation { slots, params, work: Work::Kernel(work), on_channels_last }
    }
}

impl Work {
    /// The form of a group of expressions for channels-last contents. `None` unless each tensor has the sizes of the
    /// group, or a value per channel. Tensors with channels-last strides are not changed.
    pub fn on_channels_last<P>(
        draft: &Draft<Slot, P>,
        aliases: impl Fn(Slot, Slot) -> bool,
    ) -> Option<OnChannelsLast<Work>> {
        let [lane] = &draft.lanes[..] else { return None };
        let sizes = Planes::of(&lane.sizes)?;
        let mut planes: SmallVec<[Option<Option<Planes>>; 8]> = SmallVec::from_elem(None, draft.slots.len());
        let lane = lane.with_strides(|slot, mem, own, strides| {
            let order = Order::of(own, strides).filter(|_| own == &lane.sizes[..]);
            let whole = mem == Mem::F32 && order == Some(Order::RowMajor);
            let lead = lane.sizes.len() - own.len();
            let by_channel = own.iter().enumerate().all(|(d, size)| *size == 1 || d + lead == 1);
            let layout = whole.then_some(sizes);
            let first = planes[slot as usize].get_or_insert(layout);
            let fits = whole || by_channel || order == Some(Order::ChannelsLast);
            (*first == layout && fits).then(|| if whole { channels_last(own) } else { strides.into() })
        })?;
        let planes: Box<[Option<Planes>]> = planes.into_iter().map(Option::flatten).collect();
        planes.iter().any(Option::is_some).then_some(())?;
        let draft = Draft {
            lanes: vec![lane],
            slots: draft.slots.clone(),
            params: Vec::<P>::new(),
            calls: draft.calls,
        };
        let work = Work::Tiles(TileGroup::compile(&draft, aliases)?);
        Some(OnChannelsLast { planes, preferred: false, work })
    }

    /// Runs the computation. `data` has the addresses of the slots, `params` the bits of the parameters. Returns false
    /// if PyTorch's kernel has to run; only outputs may have been written then.
    ///
    /// # Safety
    /// - `data` has, for each slot, the address where its windows begin. The addresses of summands and of sums may be
    ///   null (see [`Summed::run`]).
    /// - All windows are in live memory.
    /// - A written window overlaps no other window of this computation, unless both are the same window in the same
    ///   lane.
    /// - Until the function returns, nobody else writes the windows, or reads the windows that are written.
    pub unsafe fn run(&self, host: &dyn HostKernels, data: &[*mut u8], params: &[u64]) -> bool {
        match self {
            // SAFETY: the group was compiled with the slots of this computation, whose windows are live and not shared.
            Work::Tiles(group) => unsafe { group.run(host, data, params) },
            // SAFETY: the sums were compiled with the slots of this computation, whose windows are live and not shared.
            Work::Summed(summed) => return unsafe { summed.run(host, data, params) },
            // SAFETY: the slots are the kernel's windows, in its order, which are live and not shared.
            Work::Kernel(work) => return unsafe { work.run(host, data, params) },
        }
        true
    }
}

impl<S, P> fmt::Display for Computation<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.work, f)
    }
}
