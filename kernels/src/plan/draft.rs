//! Drafts of groups: computations that are to be carried out together, element by element.
//!
//! A draft has lanes, each of its own sizes: one for an operator on tensors, one an item for an operator on lists. What
//! a lane's computations pass on to one another is an expression, and need not be stored.

use tandem_tracegraph::call::Call;

use crate::ir::{E, Mem, Ty};
use crate::ops::express::{Job, Param, Window};
use crate::shapes::{Dims, coalesce, expanded};

/// See the module. `S` says where windows begin, `P` where parameters come from.
pub struct Draft<S, P> {
    /// Its lanes.
    pub lanes: Vec<Lane>,
    /// Where windows begin, by number.
    pub slots: Vec<S>,
    /// Where parameters come from, by number.
    pub params: Vec<P>,
    /// Calls that were added.
    pub calls: usize,
}

/// The computations of elements that are numbered alike.
pub struct Lane {
    /// How they are numbered.
    pub sizes: Dims,
    /// What they are read from and stored to. A load names a window by its number, its address says nothing.
    pub windows: Vec<Held>,
}

/// A window in a lane, and the value that the lane has given it.
pub struct Held {
    /// Number of the slot where it begins.
    pub slot: u16,
    /// How its elements lie.
    pub mem: Mem,
    sizes: Dims,
    strides: Dims,
    value: Option<E>,
    dropped: bool,
}

impl<S: Copy + PartialEq, P: Copy + PartialEq> Default for Draft<S, P> {
    fn default() -> Draft<S, P> {
        Draft { lanes: Vec::new(), slots: Vec::new(), params: Vec::new(), calls: 0 }
    }
}

impl<S: Copy + PartialEq, P: Copy + PartialEq> Draft<S, P> {
    /// Adds a call's computations: to lanes of their own, or each to the lane of its number. `slot` says where a window
    /// begins, `param` where a parameter comes from. `None` where there is no expression, and then the draft is of no
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
            self.lanes.push(Lane { sizes, windows: Vec::new() });
        }
        for (lane, job) in self.lanes.iter_mut().zip(jobs) {
            let (slots, params) = (&mut self.slots, &mut self.params);
            let mut read = |window: &Window| {
                let number = lane.window(slots, window, slot(window));
                let known = lane.windows[number].value.clone();
                known.unwrap_or_else(|| E::load(window.mem, number as u32, E::int(Ty::I64, 0), None))
            };
            let value = job.expression(call, &mut read, &mut |p, ty| add(params, param(p), ty))?;
            let out = lane.window(slots, &job.out, slot(&job.out));
            lane.windows[out].value = Some(value);
        }
        self.calls += 1;
        Some(())
    }

    /// Nobody will read what was written to these slots.
    pub fn drop_slots(&mut self, dropped: impl Fn(S) -> bool) {
        for window in self.lanes.iter_mut().flat_map(|lane| &mut lane.windows) {
            window.dropped |= dropped(self.slots[window.slot as usize]);
        }
    }
}

/// A parameter as an expression, each once.
fn add<P: PartialEq>(all: &mut Vec<P>, param: P, ty: Ty) -> E {
    let known = all.iter().position(|p| *p == param);
    let number = known.unwrap_or_else(|| {
        all.push(param);
        all.len() - 1
    });
    E::param(ty, number as u32)
}

impl Lane {
    /// What is stored: a window's number and the value of its element.
    pub fn stores(&self) -> impl Iterator<Item = (usize, &E)> {
        let kept = self.windows.iter().enumerate().filter(|(_, w)| !w.dropped);
        kept.filter_map(|(number, w)| Some((number, w.value.as_ref()?)))
    }

    /// Whether what is in a window may be read behind the group.
    pub fn is_kept(&self, window: usize) -> bool {
        !self.windows[window].dropped
    }

    /// Sizes and each window's strides, with as few dimensions as will do, in the order in which the first result lies
    /// in memory.
    pub fn arranged(&self) -> (Dims, Vec<Dims>) {
        let all: Vec<Dims> =
            self.windows.iter().map(|w| expanded(&w.sizes, &w.strides, &self.sizes)).collect();
        let first = self.stores().next().map_or(0, |(number, _)| number);
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.swap(0, first);
        let ordered: Vec<&[i64]> = order.iter().map(|i| &all[*i][..]).collect();
        let (sizes, mut strides) = coalesce(&self.sizes, &ordered);
        strides.swap(0, first);
        (sizes, strides)
    }

    /// The number of a window; equal ones are one.
    fn window<S: Copy + PartialEq>(&mut self, slots: &mut Vec<S>, window: &Window, slot: S) -> usize {
        let known = slots.iter().position(|s| *s == slot);
        let slot = known.unwrap_or_else(|| {
            slots.push(slot);
            slots.len() - 1
        }) as u16;
        let same = |w: &Held| {
            w.slot == slot && w.mem == window.mem && w.sizes == window.sizes && w.strides == window.strides
        };
        self.windows.iter().position(same).unwrap_or_else(|| {
            self.windows.push(Held {
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
}
