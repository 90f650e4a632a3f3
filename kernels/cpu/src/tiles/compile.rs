//! Compiler from expressions to tile programs, with common subexpression elimination and reuse of registers.

use rustc_hash::FxHashMap;

use crate::tiles::program::{
    Fun, Inst, LANES, Layout, OpCode, Splat, TILE, TileProgram, ValuePlace, size_of,
};
use tandem_executor::ir::{Bin, E, Node, Ty, Un};

/// Number of bytes between registers, so that equal elements of neighbours are in different cache sets.
const GAP: u32 = 64;

/// Number of a value during compilation, in order of definition.
type Value = u32;

/// Definition of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Def {
    Splat(Splat),
    /// Tile of a contiguous operand in memory.
    Load(u16),
    /// Tile of a strided operand.
    Gather(u16),
    Inst(OpCode, Ty, [Value; 3]),
    /// Product that is part of a [`OpCode::MulAdd`].
    Merged,
}

#[derive(Default)]
struct Values {
    defs: Vec<(Def, Ty)>,
    known: FxHashMap<(Def, Ty), Value>,
    /// Values by address of the expression. Expressions outlive this map.
    visited: FxHashMap<usize, Value>,
}

impl Values {
    fn define(&mut self, def: Def, ty: Ty) -> Value {
        *self.known.entry((def, ty)).or_insert_with(|| {
            self.defs.push((def, ty));
            self.defs.len() as Value - 1
        })
    }

    fn of(&mut self, e: &E, layouts: &[Layout]) -> Option<Value> {
        if let Some(value) = self.visited.get(&e.address()) {
            return Some(*value);
        }
        let ty = e.ty();
        let def = match e.node() {
            Node::Lit(bits) => Def::Splat(Splat::Literal(*bits)),
            Node::Param(number) => Def::Splat(Splat::Parameter(*number)),
            Node::Load { buf, guard: None, .. } => match layouts[*buf as usize] {
                Layout::Linear => Def::Load(*buf as u16),
                Layout::Single => Def::Splat(Splat::Element(*buf as u16)),
                Layout::Strided => Def::Gather(*buf as u16),
            },
            Node::Un(op, a) => self.inst(OpCode::Un(*op), a.ty(), &[a], layouts)?,
            Node::Bin(op, a, b) => self.inst(OpCode::Bin(*op), a.ty(), &[a, b], layouts)?,
            Node::Select(c, a, b) => self.inst(OpCode::Select, ty, &[c, a, b], layouts)?,
            Node::Cast(a) if ty == Ty::Bool => {
                let zero = self.define(Def::Splat(Splat::Literal(0)), a.ty());
                let number = self.of(a, layouts)?;
                Def::Inst(OpCode::Bin(Bin::Ne), a.ty(), [number, zero, number])
            }
            Node::Cast(a) => self.inst(OpCode::Cast(ty), a.ty(), &[a], layouts)?,
            Node::Call(name, args) => {
                let args: Vec<&E> = args.iter().collect();
                let single = args.iter().all(|a| a.ty() == Ty::F32);
                let fun = Fun::named(name).filter(|_| single)?;
                self.inst(OpCode::Fun(fun), Ty::F32, &args, layouts)?
            }
            Node::Load { .. } | Node::Var(_) | Node::Fold { .. } | Node::Item(..) => return None,
        };
        let value = self.define(def, ty);
        self.visited.insert(e.address(), value);
        Some(value)
    }

    fn inst(&mut self, op: OpCode, ty: Ty, args: &[&E], layouts: &[Layout]) -> Option<Def> {
        if !has(op, ty) {
            return None;
        }
        let first = self.of(args[0], layouts)?;
        let mut values = [first; 3];
        for (value, arg) in values.iter_mut().zip(args).skip(1) {
            *value = self.of(arg, layouts)?;
        }
        Some(Def::Inst(op, ty, values))
    }
}

/// Merges an addition and a product that only the addition reads into one instruction, which saves a pass over the
/// tile. Both operations are still rounded separately.
fn merge_products(defs: &mut [(Def, Ty)], stored: &[(u16, Value)]) {
    let mut readers = vec![0u32; defs.len()];
    for (def, _) in defs.iter() {
        if let Def::Inst(op, _, args) = def {
            let args = &args[..if matches!(op, OpCode::Bin(_)) { 2 } else { 3 }];
            args.iter().for_each(|a| readers[*a as usize] += 1);
        }
    }
    stored.iter().for_each(|(_, value)| readers[*value as usize] += 1);
    for i in 0..defs.len() {
        let (Def::Inst(OpCode::Bin(Bin::Add), Ty::F32, [a, b, _]), ty) = defs[i] else { continue };
        for (product, other) in [(a, b), (b, a)] {
            if let Def::Inst(OpCode::Bin(Bin::Mul), _, [x, y, _]) = defs[product as usize].0
                && readers[product as usize] == 1
            {
                defs[i] = (Def::Inst(OpCode::MulAdd, Ty::F32, [x, y, other]), ty);
                defs[product as usize].0 = Def::Merged;
                break;
            }
        }
    }
}

/// Whether the interpreter has a loop for an operation. Integer division is left out, since it may trap.
fn has(op: OpCode, ty: Ty) -> bool {
    let float = matches!(ty, Ty::F32 | Ty::F64);
    match op {
        // Bits of floats are the only values of this type.
        OpCode::Un(Un::FromBits) | OpCode::Bin(Bin::Shr) => ty == Ty::U32,
        OpCode::Bin(Bin::BitAnd | Bin::BitOr | Bin::BitXor | Bin::Ne) if ty == Ty::U32 => true,
        _ if ty == Ty::U32 => false,
        OpCode::Un(Un::Bits) => ty == Ty::F32,
        OpCode::Un(Un::Sqrt | Un::Floor | Un::Ceil | Un::Round | Un::Trunc) => float,
        OpCode::Un(Un::Neg | Un::Abs) => ty != Ty::Bool,
        OpCode::Un(Un::Not) => ty == Ty::Bool,
        OpCode::Un(Un::BitNot) | OpCode::Bin(Bin::BitAnd | Bin::BitOr) => {
            matches!(ty, Ty::I32 | Ty::I64 | Ty::Bool)
        }
        OpCode::Bin(Bin::Shl | Bin::Rem) => false,
        OpCode::Bin(Bin::BitXor) => !float,
        OpCode::Bin(Bin::And | Bin::Or) => ty == Ty::Bool,
        OpCode::Bin(Bin::Div) => float,
        OpCode::Bin(Bin::Eq | Bin::Ne | Bin::Lt | Bin::Le) => true,
        OpCode::Bin(_) => ty != Ty::Bool,
        OpCode::Fun(_) | OpCode::MulAdd => ty == Ty::F32,
        OpCode::Cast(to) => !matches!(to, Ty::Bool | Ty::U32) && to != ty,
        OpCode::Select | OpCode::Copy => true,
    }
}

/// Cost of copying an element from or to a strided operand, in additions.
const STRIDED: u32 = 2;

fn cost(op: OpCode) -> u32 {
    match op {
        OpCode::Fun(Fun::Larger | Fun::Smaller | Fun::IsNan) => 1,
        OpCode::Fun(Fun::Pow) => 20,
        OpCode::Fun(
            Fun::Sin | Fun::Cos | Fun::Tan | Fun::Asin | Fun::Acos | Fun::Atan | Fun::Atan2 | Fun::Fmod,
        ) => 16,
        OpCode::Fun(Fun::Sinh | Fun::Cosh | Fun::Asinh | Fun::Acosh | Fun::Atanh) => 20,
        OpCode::Fun(_) => 8,
        OpCode::MulAdd => 2,
        OpCode::Bin(Bin::Div) | OpCode::Un(Un::Sqrt) => 3,
        _ => 1,
    }
}

/// Compiles expressions, each paired with the number of the operand that it is stored to. `layouts` has the layout
/// of each operand; `aliases` returns whether two operands may share memory. `None` if the interpreter does not
/// support an operation.
pub fn compile(
    stores: &[(u16, E)],
    layouts: &[Layout],
    aliases: impl Fn(u16, u16) -> bool,
) -> Option<TileProgram> {
    let mut values = Values::default();
    let stored: Option<Vec<(u16, Value)>> =
        stores.iter().map(|(to, e)| Some((*to, values.of(e, layouts)?))).collect();
    let mut stored = stored?;
    // A plain copy becomes an instruction of its own, so that it reads its operand before other stores overwrite the
    // operand's memory.
    for i in 0..stored.len() {
        let (output, value) = stored[i];
        let (def, ty) = values.defs[value as usize];
        let moved = match def {
            Def::Load(from) => from != output && stored.iter().any(|(to, _)| aliases(from, *to)),
            // A splat has only one vector of lanes; a strided store needs a full tile.
            Def::Splat(_) => layouts[output as usize] != Layout::Linear,
            _ => false,
        };
        if moved {
            stored[i].1 = values.define(Def::Inst(OpCode::Copy, ty, [value; 3]), ty);
        }
    }
    let mut defs = values.defs;
    merge_products(&mut defs, &stored);

    // The last instruction that reads each value. Instructions have the numbers of the values that they define.
    let mut last = vec![0; defs.len()];
    for (number, (def, _)) in defs.iter().enumerate() {
        if let Def::Inst(_, _, args) = def {
            args.iter().for_each(|a| last[*a as usize] = number);
        }
    }
    let kept: Vec<bool> = {
        let mut kept = vec![false; defs.len()];
        stored.iter().for_each(|(_, value)| kept[*value as usize] = true);
        kept
    };
    // A value is computed directly in its output if no operand that may share the output's memory is read later.
    let direct = |value: Value| {
        let mut to = stored.iter().filter(|(_, v)| *v == value);
        let (output, _) = to.next()?;
        let read_later = defs.iter().enumerate().any(|(n, (def, _))| match def {
            Def::Load(operand) => aliases(*operand, *output) && last[n] > value as usize,
            Def::Gather(operand) => aliases(*operand, *output) && last[n] > value as usize,
            _ => false,
        });
        let linear = layouts[*output as usize] == Layout::Linear;
        (linear && !read_later && to.next().is_none()).then_some(*output)
    };

    let mut registers = Registers::default();
    let mut places: Vec<ValuePlace> = Vec::with_capacity(defs.len());
    let mut program = TileProgram::default();
    let (mut insts, mut splats, mut gathers) = (Vec::new(), Vec::new(), Vec::new());
    // Splats and gathers are filled before the first instruction.
    for (def, ty) in &defs {
        places.push(match def {
            Def::Load(operand) => ValuePlace::Memory(*operand),
            Def::Splat(splat) => {
                let at = registers.splat(*ty);
                splats.push((at, *ty, *splat));
                ValuePlace::Splat(at)
            }
            Def::Gather(operand) => {
                let register = registers.take(*ty);
                gathers.push((register, *operand));
                ValuePlace::Register(register)
            }
            Def::Inst(..) | Def::Merged => ValuePlace::Register(u32::MAX),
        });
    }
    for (number, (def, ty)) in defs.iter().enumerate() {
        let Def::Inst(op, of, args) = def else { continue };
        let to = match direct(number as Value) {
            Some(output) => ValuePlace::Memory(output),
            None => ValuePlace::Register(registers.take(*ty)),
        };
        places[number] = to;
        program.cost += cost(*op);
        insts.push(Inst { op: *op, ty: *of, args: args.map(|a| places[a as usize]), to });
        for (i, a) in args.iter().enumerate() {
            let a = *a as usize;
            let free = last[a] == number && !kept[a] && matches!(defs[a].0, Def::Inst(..));
            if free
                && !args[..i].contains(&(a as Value))
                && let ValuePlace::Register(register) = places[a]
            {
                registers.give(register, defs[a].1);
            }
        }
    }
    let mut scatters = Vec::new();
    for (output, value) in stored {
        let (from, ty) = (places[value as usize], defs[value as usize].1);
        if layouts[output as usize] != Layout::Linear {
            scatters.push((from, output));
        } else if from != ValuePlace::Memory(output) {
            program.cost += 1;
            insts.push(Inst { op: OpCode::Copy, ty, args: [from; 3], to: ValuePlace::Memory(output) });
        }
    }
    program.streams = streams(&insts);
    program.cost += STRIDED * (gathers.len() + scatters.len()) as u32;
    program.insts = insts.into();
    program.splats = splats.into();
    program.gathers = gathers.into();
    program.scatters = scatters.into();
    program.scratch = registers.end;
    Some(program)
}

/// Returns the operands in memory that instructions access, and whether they are written.
fn streams(insts: &[Inst]) -> Box<[(u16, bool)]> {
    let mut streams: Vec<(u16, bool)> = Vec::new();
    for inst in insts {
        let read = inst.args.iter().map(|place| (*place, false));
        for (place, written) in read.chain([(inst.to, true)]) {
            let ValuePlace::Memory(operand) = place else { continue };
            match streams.iter_mut().find(|(known, _)| *known == operand) {
                Some(known) => known.1 |= written,
                None => streams.push((operand, written)),
            }
        }
    }
    streams.into()
}

/// Allocator of registers, which are byte offsets in the scratch memory.
#[derive(Default)]
struct Registers {
    end: u32,
    free: FxHashMap<usize, Vec<u32>>,
}

impl Registers {
    fn take(&mut self, ty: Ty) -> u32 {
        let size = size_of(ty);
        self.free.get_mut(&size).and_then(Vec::pop).unwrap_or_else(|| {
            let at = self.end;
            self.end += (TILE * size) as u32 + GAP;
            at
        })
    }

    /// Allocates one vector of lanes in cache lines of its own.
    fn splat(&mut self, ty: Ty) -> u32 {
        let at = self.end;
        self.end += (LANES * size_of(ty)).next_multiple_of(64) as u32;
        at
    }

    fn give(&mut self, register: u32, ty: Ty) {
        self.free.entry(size_of(ty)).or_default().push(register);
    }
}
