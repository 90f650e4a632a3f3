//! Runs of kernels for PyTorch's profiler.

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime};

use rustc_hash::FxHashMap;
use tandem_executor::run::KernelRun;
use tandem_runtime::issuer;
use tandem_tracegraph::ids::LocationId;

use crate::engine::{for_shim, lock, settled};
use crate::ffi::TtKernelRun;
use crate::host::HIDES_KERNELS;
use crate::host::OPERATORS;
use crate::python::Lines;

/// Number of operators in the name of a kernel.
const NAMED: usize = 6;

#[unsafe(no_mangle)]
extern "C" fn tt_set_issuer(call: u64) {
    issuer::set(call);
}

#[unsafe(no_mangle)]
extern "C" fn tt_hide_kernels() {
    HIDES_KERNELS.store(true, Ordering::Relaxed);
}

#[unsafe(no_mangle)]
extern "C" fn tt_begin_kernel_log() -> i32 {
    for_shim(|| {
        settled(|engine| engine.log_kernels(true))?;
        HIDES_KERNELS.store(true, Ordering::Relaxed);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn tt_end_kernel_log(
    take: extern "C" fn(*mut c_void, *const TtKernelRun),
    state: *mut c_void,
) -> i32 {
    for_shim(|| {
        HIDES_KERNELS.store(false, Ordering::Relaxed);
        let log = settled(|engine| engine.log_kernels(false))?;
        let mut texts = Texts::default();
        let (now, since_1970) = (Instant::now(), SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default());
        for run in &log {
            let began = since_1970.saturating_sub(now.saturating_duration_since(run.began)).as_nanos() as i64;
            let (name, ops, lines) = texts.of(run);
            let record = TtKernelRun {
                start_ns: began,
                end_ns: began + run.ns as i64,
                issuer: run.issuer,
                name: name.as_ptr().cast(),
                name_len: name.len(),
                ops: ops.as_ptr().cast(),
                ops_len: ops.len(),
                lines: lines.as_ptr().cast(),
                lines_len: lines.len(),
                device: run.device,
            };
            take(state, &raw const record);
        }
        Ok(())
    })
}

/// Texts about kernels, kept for further runs of the same kernels.
#[derive(Default)]
struct Texts {
    lines: Lines,
    by_location: FxHashMap<LocationId, Rc<str>>,
}

impl Texts {
    fn line(&mut self, location: LocationId) -> Rc<str> {
        let lines = &mut self.lines;
        let line = self.by_location.entry(location);
        line.or_insert_with(|| lines.user_line(location, lock().locations()).into()).clone()
    }

    /// Returns a kernel's name, its operators, and the lines of the program that issued them.
    fn of(&mut self, run: &KernelRun) -> (String, String, String) {
        let ops: Vec<&str> = run.ops.iter().map(|(op, _)| OPERATORS.name(*op)).collect();
        let mut different: Vec<&str> = Vec::new();
        for op in &ops {
            let name = op.split("::").last().unwrap_or(op);
            let name = name.split('.').next().unwrap_or(name);
            if !different.contains(&name) {
                different.push(name);
            }
        }
        let more = if different.len() > NAMED { "_and_more" } else { "" };
        different.truncate(NAMED);
        let kind = if ops.len() > 1 { "tandem_fused_" } else { "tandem_" };
        let name = format!("{kind}{}{more}", different.join("_"));
        let mut lines: Vec<Rc<str>> = run.ops.iter().map(|(_, location)| self.line(*location)).collect();
        lines.dedup();
        (name, ops.join(", "), lines.join(", "))
    }
}
