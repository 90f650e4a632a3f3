//! Drafts of groups: element-wise computations of several ops that are to run as one kernel.
//!
//! A draft consists of lanes, each with its own sizes. An operator on tensors has one lane, a `_foreach_` operator
//! one lane per item of its lists. Values that one op of a lane passes to the next are expressions and need not be
//! stored.

use tandem_tracegraph::call::Call;

use crate::ir::{E, Mem, Ty};
use crate::ops::express::{Assignment, Param, TensorGeometry};
use crate::shapes::{Dims, coalesce, expanded};

/// A group under construction. `S` is the type of a window's start, and `P` the type of a parameter's source.
pub struct Draft<S, P> {
    /// Lanes of the group.
    pub lanes: Vec<Lane>,
    /// Starts of windows. Windows refer to them by index.
    pub slots: Vec<S>,
    /// Sources of parameters. Expressions refer to them by index.
    pub params: Vec<P>,
    /// Number of calls that were added.
    pub calls: usize,
}

/// Computations of the elements of one index space.
pub struct Lane {
    /// Sizes of the index space.
    pub sizes: Dims,
    /// Windows that the lane reads or writes. A load refers to a window by index; its address is unused.
    pub windows: Vec<Held>,
}

/// A window of a lane, with the value that the lane has assigned to its elements.
#[derive(Clone)]
pub struct Held {
    /// Index of the window's start in [`Draft::slots`].
    pub slot: u16,
    /// Representation of an element in memory.
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

impl<P> Draft<usize, P> {
    /// A draft of one lane that assigns to `out` what `value` makes of the elements of `ins`. The start of a window is
    /// its number: its place in `ins`, or the number after these for `out`.
    pub fn of_expression(
        ins: &[TensorGeometry],
        out: &TensorGeometry,
        value: impl FnOnce(&[E]) -> E,
    ) -> Draft<usize, P> {
        let (mut lane, mut slots) = (Lane { sizes: out.sizes.clone(), windows: Vec::new() }, Vec::new());
        let read = |(number, window): (usize, &TensorGeometry)| {
            let held = lane.window(&mut slots, window, number);
            E::load(window.mem, held as u32, E::int(Ty::I64, 0), None)
        };
        let elements: Vec<E> = ins.iter().enumerate().map(read).collect();
        let held = lane.window(&mut slots, out, ins.len());
        lane.windows[held].value = Some(value(&elements));
        Draft { lanes: vec![lane], slots, params: Vec::new(), calls: 1 }
    }
}

impl<S: Copy + PartialEq, P: Copy + PartialEq> Draft<S, P> {
    /// Adds the computations of a call, the i-th one to the i-th lane, after adding lanes if there are too few. `slot`
    /// returns the start of a window, `param` the source of a parameter. Returns `None` if a computation has no
    /// expression; the draft must then be discarded.
    pub fn add(
        &mut self,
        call: &Call<'_>,
        assignments: &[Assignment],
        slot: impl Fn(&TensorGeometry) -> S,
        param: impl Fn(Param) -> P,
    ) -> Option<()> {
        while self.lanes.len() < assignments.len() {
            let sizes = assignments[self.lanes.len()].out.sizes.clone();
            self.lanes.push(Lane { sizes, windows: Vec::new() });
        }
        for (lane, assignment) in self.lanes.iter_mut().zip(assignments) {
            let (slots, params) = (&mut self.slots, &mut self.params);
            let mut read = |window: &TensorGeometry| {
                let number = lane.window(slots, window, slot(window));
                let known = lane.windows[number].value.clone();
                known.unwrap_or_else(|| E::load(window.mem, number as u32, E::int(Ty::I64, 0), None))
            };
            let value = assignment.expression(call, &mut read, &mut |p, ty| add(params, param(p), ty))?;
            let out = lane.window(slots, &assignment.out, slot(&assignment.out));
            lane.windows[out].value = Some(value);
        }
        self.calls += 1;
        Some(())
    }

    /// Marks windows whose start is `dropped`: nothing reads their contents after the group.
    pub fn drop_slots(&mut self, dropped: impl Fn(S) -> bool) {
        for window in self.lanes.iter_mut().flat_map(|lane| &mut lane.windows) {
            window.dropped |= dropped(self.slots[window.slot as usize]);
        }
    }
}

/// A parameter as an expression. Equal sources share a parameter.
fn add<P: PartialEq>(all: &mut Vec<P>, param: P, ty: Ty) -> E {
    let known = all.iter().position(|p| *p == param);
    let number = known.unwrap_or_else(|| {
        all.push(param);
        all.len() - 1
    });
    E::param(ty, number as u32)
}

impl Lane {
    /// The windows that are stored, by index, with the values of their elements.
    pub fn stores(&self) -> impl Iterator<Item = (usize, &E)> {
        let kept = self.windows.iter().enumerate().filter(|(_, w)| !w.dropped);
        kept.filter_map(|(number, w)| Some((number, w.value.as_ref()?)))
    }

    /// Whether the contents of a window may be read after the group.
    pub fn is_kept(&self, window: usize) -> bool {
        !self.windows[window].dropped
    }

    /// The same lane with other strides of its windows. `strides` returns them for a window's slot, representation,
    /// sizes and strides. `None` if `strides` returns `None` for a window.
    pub fn with_strides(
        &self,
        mut strides: impl FnMut(u16, Mem, &[i64], &[i64]) -> Option<Dims>,
    ) -> Option<Lane> {
        let windows = self.windows.iter().map(|w| {
            let strides = strides(w.slot, w.mem, &w.sizes, &w.strides)?;
            Some(Held { strides, ..w.clone() })
        });
        Some(Lane { sizes: self.sizes.clone(), windows: windows.collect::<Option<_>>()? })
    }

    /// The lane's sizes and the strides of each window, with as few dimensions as possible, ordered by the strides
    /// of the first window that is stored.
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

    /// The index of a window. If the lane has no equal window, the window is added.
    fn window<S: Copy + PartialEq>(&mut self, slots: &mut Vec<S>, window: &TensorGeometry, slot: S) -> usize {
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
