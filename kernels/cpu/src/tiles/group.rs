//! Groups: drafts compiled to tile programs, whose intermediate values stay in registers.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::tiles::compile::compile;
use crate::tiles::interpret::{Launch, MemoryOperand};
use crate::tiles::program::{Layout, TileProgram};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::E;
use tandem_executor::plan;
use tandem_executor::plan::Draft;
use tandem_executor::shapes::Dims;

/// A compiled draft.
#[derive(Debug)]
pub struct TileGroup {
    lanes: Box<[Lane]>,
    /// Number of elements before each lane; the last entry is the total.
    starts: Box<[usize]>,
    grain: usize,
}

/// Computations over the same sizes, and their program.
#[derive(Debug)]
pub(crate) struct Lane {
    sizes: Dims,
    windows: Box<[MemoryOperand]>,
    program: Arc<TileProgram>,
}

impl TileGroup {
    /// Compiles a draft. `aliases` returns whether two slots may share memory.
    pub fn compile<S: Copy, P>(draft: &Draft<S, P>, aliases: impl Fn(S, S) -> bool) -> Option<TileGroup> {
        let mut programs: Vec<Arc<TileProgram>> = Vec::new();
        let slots = &draft.slots;
        let aliases = |a: u16, b: u16| aliases(slots[a as usize], slots[b as usize]);
        let lanes = draft.lanes.iter().filter(|lane| lane.sizes.iter().all(|size| *size > 0));
        let lanes: Option<Vec<Lane>> = lanes.map(|lane| Lane::of(lane, &mut programs, &aliases)).collect();
        let lanes = lanes?;
        let mut starts = vec![0];
        for lane in &lanes {
            starts.push(starts[starts.len() - 1] + lane.sizes.iter().product::<i64>() as usize);
        }
        let grain = lanes.iter().map(|l| l.program.grain()).min().unwrap_or(1);
        Some(TileGroup { lanes: lanes.into(), starts: starts.into(), grain })
    }

    /// Computes the group. `data` has the addresses of the slots, `params` the bits of the parameters.
    ///
    /// # Safety
    /// - `data` has, for each slot of the draft, the address where its windows begin.
    /// - All windows are in live memory.
    /// - Until the function returns, nobody else writes the windows.
    /// - Nobody else, including other lanes, reads the windows that a lane writes.
    pub unsafe fn run(&self, host: &dyn HostKernels, data: &[*mut u8], params: &[u64]) {
        let total = self.starts[self.lanes.len()];
        let data = Shared(data);
        let body = |from: usize, to: usize| {
            let data = &data;
            let mut lane = self.starts.partition_point(|start| *start <= from) - 1;
            let mut at = from;
            while at < to {
                let end = self.starts[lane + 1].min(to);
                let start = self.starts[lane];
                // SAFETY: the lane's windows are those of the draft, which are live and not shared; its elements
                // `at - start..end - start` are below its size, and `host.parallel` passes no element twice.
                unsafe { self.lanes[lane].run(data.0, params, at - start, end - start) };
                at = end;
                lane += 1;
            }
        };
        if total <= self.grain { body(0, total) } else { host.parallel(total, self.grain as f64, &body) }
    }
}

impl fmt::Display for TileGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} lanes, {} elements]", self.lanes.len(), self.starts[self.lanes.len()])
    }
}

/// Addresses of slots, shared by threads.
pub(super) struct Shared<'a>(pub &'a [*mut u8]);

// SAFETY: the addresses are only read; where they point, threads compute disjoint elements.
unsafe impl Sync for Shared<'_> {}

impl Lane {
    /// Compiles a lane of a draft. Equal programs are shared: `programs` has the programs of the lanes before.
    /// `aliases` returns whether two slots may share memory.
    pub fn of(
        draft: &plan::Lane,
        programs: &mut Vec<Arc<TileProgram>>,
        aliases: &dyn Fn(u16, u16) -> bool,
    ) -> Option<Lane> {
        let (sizes, strides) = draft.arranged();
        let layouts: SmallVec<[Layout; 8]> = strides.iter().map(|strides| layout(&sizes, strides)).collect();
        let stores: Vec<(u16, E)> = draft.stores().map(|(number, e)| (number as u16, e.clone())).collect();
        let slot = |window: u16| draft.windows[window as usize].slot;
        let program = compile(&stores, &layouts, |a, b| aliases(slot(a), slot(b)))?;
        let known = programs.iter().find(|p| ***p == program).cloned();
        let program = known.unwrap_or_else(|| {
            programs.push(Arc::new(program));
            programs[programs.len() - 1].clone()
        });
        let windows = draft.windows.iter().zip(strides);
        let windows =
            windows.map(|(w, strides)| MemoryOperand { slot: w.slot, strides, size: w.mem.size() as usize });
        Some(Lane { windows: windows.collect(), sizes, program })
    }

    /// Whether the elements of a window are contiguous, in the order in which the lane computes them.
    pub fn is_linear(&self, window: usize) -> bool {
        layout(&self.sizes, &self.windows[window].strides) == Layout::Linear
    }

    /// Computes elements `from..to` of the lane.
    ///
    /// # Safety
    /// - The requirements of [`TileGroup::run`], for elements `from..to` of the windows.
    /// - `to` is at most the number of elements.
    pub unsafe fn run(&self, data: &[*mut u8], params: &[u64], from: usize, to: usize) {
        let launch =
            Launch { program: &self.program, sizes: &self.sizes, windows: &self.windows, data, params };
        // SAFETY: `compile` made the program for these windows, whose elements `from..to` are live and not shared.
        unsafe { launch.run(from, to) };
    }
}

/// Returns the layout of a window with these sizes and strides.
fn layout(sizes: &[i64], strides: &[i64]) -> Layout {
    let mut expected = 1;
    let linear = sizes.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == expected;
        expected *= size;
        fits
    });
    let single = sizes.iter().zip(strides).all(|(size, stride)| *size == 1 || *stride == 0);
    match (linear, single) {
        (true, _) => Layout::Linear,
        (_, true) => Layout::Single,
        _ => Layout::Strided,
    }
}
