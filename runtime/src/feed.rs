//! Input Feeding: the data that a validated op adds to the open run.

use tandem_executor::host::Exception;
use tandem_executor::run::BlockRun;
use tandem_tracegraph::call::{Arg, Call, Input, Place};
use tandem_tracegraph::node::{ArgSpec, NodeKey};
use tandem_tracegraph::ops::OpInfo;

use crate::torch::Torch;

/// Adds an op's storages and offsets, and copies of its host tensors, which the program may overwrite right after
/// the call. If a copy fails, nothing is added.
pub fn inputs(run: &mut BlockRun, call: &Call<'_>, torch: &dyn Torch) -> Result<(), Exception> {
    for (i, input) in call.inputs.iter().enumerate() {
        match input.place {
            Place::Storage { id, .. } => {
                run.storages.push(id);
                run.offsets.push(input.offset);
            }
            Place::Host(_) => match torch.snapshot(input) {
                Ok(fed) => run.hosts.push(fed),
                Err(exception) => {
                    take_back(run, &call.inputs[..i]);
                    return Err(exception);
                }
            },
            Place::Absent | Place::Buffer(_) | Place::Inline(_) => {}
        }
    }
    Ok(())
}

/// Removes the feeds of these inputs, which are the latest in the run.
#[cold]
fn take_back(run: &mut BlockRun, fed: &[Input<'_>]) {
    for input in fed {
        match input.place {
            Place::Storage { .. } => {
                run.storages.pop();
                run.offsets.pop();
            }
            Place::Host(_) => drop(run.hosts.pop()),
            Place::Absent | Place::Buffer(_) | Place::Inline(_) => {}
        }
    }
}

/// Adds an op's numbers and generators.
pub fn values(run: &mut BlockRun, key: &NodeKey, call: &Call<'_>, torch: &dyn Torch) {
    for (spec, arg) in key.args.iter().zip(&call.args) {
        match (spec, arg) {
            (ArgSpec::Value(_), arg) => number(run, arg),
            (ArgSpec::Floats(_), Arg::Floats(list)) => run.numbers.extend(list.iter().map(|f| f.to_bits())),
            (ArgSpec::Ints(_), Arg::Ints(list)) => run.numbers.extend(list.iter().map(|i| *i as u64)),
            (ArgSpec::Values(_), Arg::Scalars(list)) => list.iter().for_each(|a| number(run, a)),
            (ArgSpec::Generator, Arg::Generator(g)) => run.generators.push(torch.generator(*g)),
            _ => {}
        }
    }
}

fn number(run: &mut BlockRun, arg: &Arg<'_>) {
    match arg {
        Arg::Int(i) => run.numbers.push(*i as u64),
        Arg::Unsigned(n) => run.numbers.push(*n),
        Arg::Float(f) => run.numbers.push(f.to_bits()),
        Arg::Bool(b) => run.numbers.push(u64::from(*b)),
        Arg::Complex(re, im) => run.numbers.extend([re.to_bits(), im.to_bits()]),
        _ => {}
    }
}

/// Returns the indices of the inputs that an op writes, with tensor lists flattened.
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
