//! The recorded events as plain data, which `_report/types.py` describes to Python.

use serde::Serialize;
use tandem_runtime::engine::Engine;
use tandem_runtime::timeline::{Event, Python as PythonDid};

use crate::python::Lines;

/// Recorded events. Times are in microseconds.
#[derive(Serialize, Default)]
pub struct Timeline {
    /// Activities of PythonRunner: start, duration, kind, iteration, source line.
    python: Vec<(f64, f64, &'static str, u64, String)>,
    /// Runs: start, duration, thread (`beside` for GraphRunner's, `inline` for Python's), first block, number of ops,
    /// iteration.
    runs: Vec<(f64, f64, &'static str, u32, u32, u64)>,
    /// Iterations: number, start, end.
    steps: Vec<(u64, f64, f64)>,
    dropped: u64,
}

impl Timeline {
    /// Returns the recorded events.
    pub fn of(engine: &Engine) -> Timeline {
        let (events, dropped) = engine.runner().timeline().events();
        let mut lines = Lines::default();
        let mut timeline = Timeline { dropped, ..Timeline::default() };
        let us = |ns: u64| ns as f64 / 1000.0;
        for event in events {
            match event {
                Event::Python(span, what, iteration, location) => {
                    let what = match what {
                        PythonDid::Fetch => "fetch",
                        PythonDid::Stall => "stall",
                        PythonDid::Kernels => "kernels",
                        PythonDid::Trace => "trace",
                    };
                    let line = lines.user_line(location, engine.locations());
                    timeline.python.push((us(span.start), us(span.duration), what, iteration, line));
                }
                Event::Run(span, place, block, ops, iteration) => {
                    let (start, duration) = (us(span.start), us(span.duration));
                    timeline.runs.push((start, duration, place.name(), block, ops, iteration));
                }
                Event::Step(span, number) => {
                    timeline.steps.push((number, us(span.start), us(span.start + span.duration)));
                }
            }
        }
        timeline
    }
}
