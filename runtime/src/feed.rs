//! Input Feeding: what a validated op adds to the open block's streams.

use tandem_kernels::executor::BlockRun;
use tandem_tracegraph::call::{Arg, Call, Place};
use tandem_tracegraph::node::{ArgSpec, NodeKey};
use tandem_tracegraph::ops::OpInfo;

use crate::torch::Torch;

/// Binds storages and offsets, and copies host tensors, which the program may overwrite at once.
pub fn inputs(run: &mut BlockRun, call: &Call<'_>, torch: &dyn Torch) {
    for input in &call.inputs {
        match input.place {
            Place::Storage { id, .. } => {
                run.storages.push(id);
                run.offsets.push(input.offset);
            }
            Place::Host(_) => run.hosts.push(torch.snapshot(input)),
            Place::Absent | Place::Buffer(_) | Place::Inline(_) => {}
        }
    }
}

/// Copies numbers and generators.
pub fn values(run: &mut BlockRun, key: &NodeKey, call: &Call<'_>, torch: &dyn Torch) {
    for (spec, arg) in key.args.iter().zip(&call.args) {
        match (spec, arg) {
            (ArgSpec::Value(_), arg) => number(run, arg),
            (ArgSpec::Floats(_), Arg::Floats(list)) => run.numbers.extend(list.iter().map(|f| f.to_bits())),
            (ArgSpec::Values(_), Arg::Scalars(list)) => list.iter().for_each(|a| number(run, a)),
            (ArgSpec::Generator, Arg::Generator(g)) => run.generators.push(torch.generator(*g)),
            _ => {}
        }
    }
}

fn number(run: &mut BlockRun, arg: &Arg<'_>) {
    match arg {
        Arg::Int(i) => run.numbers.push(*i as u64),
        Arg::Float(f) => run.numbers.push(f.to_bits()),
        Arg::Bool(b) => run.numbers.push(u64::from(*b)),
        Arg::Complex(re, im) => run.numbers.extend([re.to_bits(), im.to_bits()]),
        _ => {}
    }
}

/// The flat inputs that an op writes.
pub fn written_inputs(key: &NodeKey, info: &OpInfo) -> Box<[u32]> {
    let mut flat = 0;
    let mut written = Vec::new();
    for (spec, writes) in key.args.iter().zip(info.written.iter()) {
        let n = match spec {
            ArgSpec::Tensor => 1,
            ArgSpec::Tensors(n) => *n,
            _ => 0,
        };
        if *writes {
            written.extend(flat..flat + n);
        }
        flat += n;
    }
    written.into()
}
