//! Groups: computations that are carried out together, tile by tile.
//!
//! A group has lanes, each of its own sizes: one for an operator on tensors, one an item for an operator on lists. What
//! a lane's computations pass on to one another stays in registers.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;
use tandem_tracegraph::call::Call;

use super::computation::{Computation, Work};
use super::express::{Job, Param, Params, Window};
use super::tile::{self, Launch, Layout, Program, compile};
use crate::executor::HostKernels;
use crate::ir::{E, Mem, Ty};
use crate::shapes::{Dims, coalesce, expanded};

/// A group that is being made. `S` says where windows begin, `P` where parameters come from.
pub struct Builder<S, P> {
    lanes: Vec<LaneBuilder>,
    slots: Vec<S>,
    params: Params<P>,
}

struct LaneBuilder {
    sizes: Dims,
    windows: Vec<LaneWindow>,
}

/// A window in a lane, and the value that the lane has given it.
struct LaneWindow {
    slot: u16,
    mem: Mem,
    sizes: Dims,
    strides: Dims,
    value: Option<E>,
    dropped: bool,
}

/// What is carried out together.
#[derive(Debug)]
pub struct Group {
    lanes: Box<[Lane]>,
    /// Elements before each lane, and of all.
    starts: Box<[usize]>,
    grain: usize,
}

#[derive(Debug)]
struct Lane {
    sizes: Dims,
    /// Slot, strides and bytes of an element.
    windows: Box<[(u16, Dims, usize)]>,
    program: Arc<Program>,
}

impl<S: Copy + PartialEq, P: Copy + PartialEq> Default for Builder<S, P> {
    fn default() -> Builder<S, P> {
        Builder { lanes: Vec::new(), slots: Vec::new(), params: Params::default() }
    }
}

impl<S: Copy + PartialEq, P: Copy + PartialEq> Builder<S, P> {
    /// Adds a call's computations: to lanes of their own, or each to the lane of its number. `slot` says where a window
    /// begins, `param` where a parameter comes from. `None` where there is no expression, and then the builder is of no
    /// use any more.
    pub fn add(
        &mut self,
        call: &Call<'_>,
        jobs: &[Job],
        slot: impl Fn(&Window) -> S,
        param: impl Fn(Param) -> P,
    ) -> Option<()> {
        while self.lanes.len() < jobs.len() {
            let sizes = jobs[self.lanes.len()].out.sizes.clone();
            self.lanes.push(LaneBuilder { sizes, windows: Vec::new() });
        }
        for (lane, job) in self.lanes.iter_mut().zip(jobs) {
            let (slots, params) = (&mut self.slots, &mut self.params);
            let mut read = |window: &Window| {
                let number = lane.window(slots, window, slot(window));
                let known = lane.windows[number].value.clone();
                known.unwrap_or_else(|| E::load(window.mem, number as u32, E::int(Ty::I64, 0), None))
            };
            let value = job.expression(call, &mut read, &mut |p, ty| params.add(param(p), ty))?;
            let out = lane.window(slots, &job.out, slot(&job.out));
            lane.windows[out].value = Some(value);
        }
        Some(())
    }

    /// Nobody will read what was written to these slots.
    pub fn drop_slots(&mut self, dropped: impl Fn(S) -> bool) {
        for window in self.lanes.iter_mut().flat_map(|lane| &mut lane.windows) {
            window.dropped |= dropped(self.slots[window.slot as usize]);
        }
    }

    /// Compiles. `aliases` says whether two slots may be in the same memory.
    pub fn finish(self, aliases: impl Fn(S, S) -> bool) -> Option<Computation<S, P>> {
        let mut programs: Vec<Arc<Program>> = Vec::new();
        let slots = &self.slots;
        let aliases = |a: u16, b: u16| aliases(slots[a as usize], slots[b as usize]);
        let lanes = self.lanes.into_iter().filter(|lane| lane.sizes.iter().all(|size| *size > 0));
        let lanes: Option<Vec<Lane>> = lanes.map(|lane| lane.finish(&mut programs, &aliases)).collect();
        let lanes = lanes?;
        let mut starts = vec![0];
        for lane in &lanes {
            starts.push(starts[starts.len() - 1] + lane.sizes.iter().product::<i64>() as usize);
        }
        let grain = lanes.iter().map(|l| l.program.grain()).min().unwrap_or(1);
        let group = Group { lanes: lanes.into(), starts: starts.into(), grain };
        Some(Computation {
            slots: self.slots.into(),
            params: self.params.all.into(),
            work: Work::Tiles(group),
        })
    }
}

impl LaneBuilder {
    /// The number of a window; equal ones are one.
    fn window<S: Copy + PartialEq>(&mut self, slots: &mut Vec<S>, window: &Window, slot: S) -> usize {
        let known = slots.iter().position(|s| *s == slot);
        let slot = known.unwrap_or_else(|| {
            slots.push(slot);
            slots.len() - 1
        }) as u16;
        let same = |w: &LaneWindow| {
            w.slot == slot && w.mem == window.mem && w.sizes == window.sizes && w.strides == window.strides
        };
        self.windows.iter().position(same).unwrap_or_else(|| {
            self.windows.push(LaneWindow {
                slot,
                mem: window.mem,
                sizes: window.sizes.clone(),
                strides: window.strides.clone(),
                value: None,
                dropped: false,
            });
            self.windows.len() - 1
        })
    }

    fn finish(self, programs: &mut Vec<Arc<Program>>, aliases: &dyn Fn(u16, u16) -> bool) -> Option<Lane> {
        let all: Vec<Dims> =
            self.windows.iter().map(|w| expanded(&w.sizes, &w.strides, &self.sizes)).collect();
        // Elements are computed in the order in which the first result lies in memory.
        let first = self.windows.iter().position(|w| w.value.is_some() && !w.dropped).unwrap_or(0);
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.swap(0, first);
        let ordered: Vec<&[i64]> = order.iter().map(|i| &all[*i][..]).collect();
        let (sizes, mut strides) = coalesce(&self.sizes, &ordered);
        strides.swap(0, first);
        let layout = |strides: &Dims| {
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
        };
        let layouts: SmallVec<[Layout; 8]> = strides.iter().map(layout).collect();
        let stores: Vec<(u16, E)> = self
            .windows
            .iter()
            .enumerate()
            .filter(|(_, w)| !w.dropped)
            .filter_map(|(i, w)| Some((i as u16, w.value.clone()?)))
            .collect();
        let slot = |window: u16| self.windows[window as usize].slot;
        let program = compile(&stores, &layouts, |a, b| aliases(slot(a), slot(b)))?;
        let known = programs.iter().find(|p| ***p == program).cloned();
        let program = known.unwrap_or_else(|| {
            programs.push(Arc::new(program));
            programs[programs.len() - 1].clone()
        });
        let windows =
            self.windows.iter().zip(strides).map(|(w, s)| (w.slot, s, w.mem.size() as usize)).collect();
        Some(Lane { sizes, windows, program })
    }
}

impl Group {
    /// Computes. `data` are the slots' first elements, `params` the parameters' bits; unless `parallel`, one lane
    /// behind the other.
    ///
    /// # Safety
    /// All windows lie in live memory; what is written nobody else reads or writes meanwhile.
    pub unsafe fn run(&self, host: &dyn HostKernels, data: &[*mut u8], params: &[u64], parallel: bool) {
        let total = self.starts[self.lanes.len()];
        let data = Shared(data);
        let body = |from: usize, to: usize| {
            let data = &data;
            let mut lane = self.starts.partition_point(|start| *start <= from) - 1;
            let mut at = from;
            while at < to {
                let end = self.starts[lane + 1].min(to);
                let start = self.starts[lane];
                // SAFETY: the caller's promise.
                unsafe { self.lanes[lane].run(data.0, params, at - start, end - start) };
                at = end;
                lane += 1;
            }
        };
        if total <= self.grain || !parallel {
            body(0, total)
        } else {
            host.parallel(total, self.grain, &body)
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} lanes, {} elements]", self.lanes.len(), self.starts[self.lanes.len()])
    }
}

/// Addresses that threads share.
struct Shared<'a>(&'a [*mut u8]);

// SAFETY: see `Group::run`.
unsafe impl Sync for Shared<'_> {}

impl Lane {
    unsafe fn run(&self, data: &[*mut u8], params: &[u64], from: usize, to: usize) {
        let windows: SmallVec<[tile::Window<'_>; 8]> = self
            .windows
            .iter()
            .map(|(slot, strides, size)| tile::Window { data: data[*slot as usize], strides, size: *size })
            .collect();
        let launch = Launch { program: &self.program, sizes: &self.sizes, windows: &windows, params };
        // SAFETY: the caller's promise.
        unsafe { launch.run(from, to) };
    }
}
