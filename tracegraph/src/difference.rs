//! Descriptions of how a call differs from the expected node, for users.

use crate::call::{Arg, Call, Place};
use crate::ids::OpId;
use crate::node::{ArgSpec, Attr, InputSpec, Node, arg_matches, input_spec, mode_bits};
use crate::tensor_meta::Dtype;

/// The kind of a difference.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum What {
    /// Different operators.
    Operator,
    /// Different values of an attribute, or an optional argument that only one of the two calls has.
    Attribute,
    /// A host tensor instead of one on the device, or the reverse.
    Input,
    /// Different devices.
    Device,
    /// Different grad modes, default dtypes, or `requires_grad` of an input.
    Modes,
    /// An input from another op.
    Dataflow,
    /// An op that begins none of several known branches.
    Branch,
    /// An op where the iteration was expected to end.
    End,
    /// The same operator at another location of the program.
    Location,
}

impl What {
    /// The name of the kind in reports.
    pub fn name(self) -> &'static str {
        match self {
            What::Operator => "operator",
            What::Attribute => "attribute",
            What::Input => "input",
            What::Device => "device",
            What::Modes => "modes",
            What::Dataflow => "dataflow",
            What::Branch => "branch",
            What::End => "end",
            What::Location => "location",
        }
    }
}

/// A difference between a call and the expected node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Difference {
    /// Kind of the difference.
    pub what: What,
    /// Text form of the expected value.
    pub expected: String,
    /// Text form of the actual value.
    pub got: String,
}

fn spec_text(spec: &ArgSpec) -> String {
    match spec {
        ArgSpec::None => "None".into(),
        ArgSpec::Tensor => "a tensor".into(),
        ArgSpec::Tensors(n) => format!("{n} tensors"),
        ArgSpec::Attr(Attr::Int(i)) => i.to_string(),
        ArgSpec::Attr(Attr::Bool(b)) => b.to_string(),
        ArgSpec::Attr(Attr::Str(s)) => format!("{s:?}"),
        ArgSpec::Attr(Attr::Ints(v)) => format!("{v:?}"),
        ArgSpec::Attr(Attr::Bools(v)) => format!("{v:?}"),
        ArgSpec::Any => "any value".into(),
        ArgSpec::Size => "a size".into(),
        ArgSpec::Sizes => "sizes".into(),
        ArgSpec::Value(n) => format!("a number of type {n:?}").to_lowercase(),
        ArgSpec::Floats(n) => format!("{n} floats"),
        ArgSpec::Ints(n) => format!("{n} ints"),
        ArgSpec::Values(v) => format!("{} numbers", v.len()),
        ArgSpec::Device(_) => "another device".into(),
        ArgSpec::Generator => "a generator".into(),
    }
}

fn arg_text(arg: &Arg<'_>) -> String {
    match arg {
        Arg::None => "None".into(),
        Arg::Tensor => "a tensor".into(),
        Arg::Tensors(n) => format!("{n} tensors"),
        Arg::Int(i) => i.to_string(),
        Arg::Unsigned(n) => n.to_string(),
        Arg::Float(f) => format!("{f:?}"),
        Arg::Bool(b) => b.to_string(),
        Arg::Complex(re, im) => format!("{re}+{im}j"),
        Arg::Str(s) => format!("{s:?}"),
        Arg::Ints(v) => format!("{v:?}"),
        Arg::Floats(v) => format!("{v:?}"),
        Arg::Bools(v) => format!("{v:?}"),
        Arg::Scalars(v) => format!("{} numbers", v.len()),
        Arg::Device(_) => "a device".into(),
        Arg::Generator(_) => "a generator".into(),
    }
}

fn input_text(spec: InputSpec) -> &'static str {
    match spec {
        InputSpec::Absent => "None",
        InputSpec::Storage => "a tensor on the device",
        InputSpec::Host => "a host tensor",
    }
}

/// The parts of two calls' modes that differ, as texts.
fn unequal_modes(one: u64, two: u64) -> [String; 2] {
    let parts = |modes: u64| {
        let requiring: Vec<String> = (0..56).filter(|i| modes >> i & 1 == 1).map(|i| i.to_string()).collect();
        let grad = if modes >> 63 == 1 { "on" } else { "off" };
        let default = Dtype((modes >> 56 & 0x7f) as u8).name();
        let inputs =
            if requiring.is_empty() { "no input".into() } else { format!("inputs {}", requiring.join(", ")) };
        [
            format!("grad mode {grad}"),
            format!("default dtype {default}"),
            format!("requires_grad of {inputs}"),
        ]
    };
    let (one, two) = (parts(one), parts(two));
    let unequal: Vec<usize> = (0..one.len()).filter(|i| one[*i] != two[*i]).collect();
    [one, two].map(|parts| unequal.iter().map(|i| parts[*i].as_str()).collect::<Vec<_>>().join(", "))
}

impl Difference {
    /// The first difference between `node` and `call`. `name` returns the name of an operator.
    pub fn of(node: &Node, call: &Call<'_>, name: impl Fn(OpId) -> String) -> Difference {
        let differs = |what, expected: String, got: String| Difference { what, expected, got };
        let key = &node.key;
        if key.op != call.op {
            return differs(What::Operator, name(key.op), name(call.op));
        }
        for (i, (spec, arg)) in key.args.iter().zip(&call.args).enumerate() {
            if !arg_matches(spec, arg) {
                let (expected, got) = (spec_text(spec), arg_text(arg));
                return differs(What::Attribute, format!("argument {i} = {expected}"), got);
            }
        }
        for (i, (spec, input)) in key.inputs.iter().zip(&call.inputs).enumerate() {
            if *spec != input_spec(input) {
                let expected = format!("input {i} = {}", input_text(*spec));
                return differs(What::Input, expected, input_text(input_spec(input)).into());
            }
        }
        if key.device != call.device {
            let device = |index: u8| format!("tandem:{index}");
            return differs(What::Device, device(key.device), device(call.device));
        }
        if key.modes != mode_bits(call) {
            let [expected, got] = unequal_modes(key.modes, mode_bits(call));
            return differs(What::Modes, expected, got);
        }
        for (i, (sources, input)) in node.sources.iter().zip(&call.inputs).enumerate() {
            if let Place::Storage { name, .. } = input.place
                && !sources.contains(name)
            {
                let known: Vec<String> = sources.names().iter().map(ToString::to_string).collect();
                return differs(
                    What::Dataflow,
                    format!("input {i} from {}", known.join(" or ")),
                    name.to_string(),
                );
            }
        }
        differs(What::Location, "another line of the program".into(), "this one".into())
    }

    /// The entry that counts all further differences at a location, once many have been kept there.
    pub fn further(self) -> Difference {
        Difference {
            what: self.what,
            expected: "what the graph has".into(),
            got: "another one each time".into(),
        }
    }

    /// The difference as a phrase for users.
    pub fn sentence(&self) -> String {
        match self.what {
            What::Operator => format!("expected {}", self.expected),
            What::Branch => format!("none of {}, got {}", self.expected, self.got),
            What::End => "expected the iteration to end".into(),
            What::Location => "the same operator, but at another place".into(),
            _ => format!("expected {}, got {}", self.expected, self.got),
        }
    }
}
