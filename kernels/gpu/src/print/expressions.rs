//! Prints expressions. Each expression is computed once, in the outermost block that binds all variables it depends on.

use std::fmt::Write as _;

use crate::bundle::Place;
use crate::kernel::Skeleton;
use crate::print::writer::{Target, Writer, name};
use tandem_executor::ir::{Bin, E, Guard, Node, Ty, Un};

impl Writer<'_> {
    /// Returns the text of an expression's value. The code that computes it goes to the outermost block that binds
    /// all variables it depends on.
    pub(crate) fn emit(&mut self, e: &E) -> String {
        let key = std::rc::Rc::as_ptr(&e.0);
        match &e.0.node {
            Node::Lit(bits) => {
                self.ty(e.ty());
                return literal(e.ty(), *bits, self.target);
            }
            Node::Var(var) => return name(*var),
            Node::Param(word) => {
                self.ty(e.ty());
                return self.parameter(e.ty(), *word);
            }
            _ => {}
        }
        if let Some(known) = self.scopes.iter().rev().find_map(|s| s.names.get(&key)) {
            return known.clone();
        }
        let target =
            self.scopes.iter().rposition(|s| s.vars.iter().any(|v| e.0.free.contains(v))).unwrap_or(0);
        let text = self.value(e, target);
        let (target, text) = match text {
            Value::Named(text) => (target, text),
            Value::Computed(text) => {
                let ty = self.ty(e.ty());
                let scope = &mut self.scopes[target];
                let fresh = self.names;
                match scope.texts.get(&text) {
                    Some(known) => (target, known.clone()),
                    None => {
                        let name = format!("v{fresh}");
                        self.names += 1;
                        let _ = writeln!(scope.code, "    let {name}: {ty} = {text};");
                        scope.texts.insert(text, name.clone());
                        (target, name)
                    }
                }
            }
        };
        self.scopes[target].names.insert(key, text.clone());
        text
    }

    /// Returns the text of an element's index in the bound part of a buffer.
    pub(super) fn address(&mut self, buf: u32, at: &E) -> String {
        let at = self.emit(at);
        match self.kernel.bufs[buf as usize].base {
            Some(word) => format!("({at} + {})", self.parameter_word(word)),
            None => at,
        }
    }

    /// Returns ` + first` if the kernel runs in parts, to be added to the number of an element or row within the
    /// part.
    pub(super) fn plus_first(&mut self) -> String {
        let first = self.kernel.first.as_ref();
        first.map_or(String::new(), |first| format!(" + {}", self.outside(first)))
    }

    fn value(&mut self, e: &E, target: usize) -> Value {
        let text = match &e.0.node {
            Node::Lit(_) | Node::Var(_) | Node::Param(_) => String::new(),
            Node::Load { buf, at, guard: None } => format!("ld{buf}({})", self.address(*buf, at)),
            Node::Load { buf, at, guard: Some(guard) } => {
                return self.guarded(e, *buf, at, guard, target);
            }
            Node::Un(op, a) => self.unary(*op, a),
            Node::Bin(op, a, b) => self.binary(*op, a, b),
            Node::Select(c, a, b) => {
                let (c, a, b) = (self.emit(c), self.emit(a), self.emit(b));
                format!("select({b}, {a}, {c})")
            }
            Node::Cast(a) => self.cast(a, e.ty()),
            Node::Call(function, args) => {
                self.lacks |= args.iter().any(|a| a.ty() == Ty::F64);
                let args: Vec<String> = args.iter().map(|a| self.emit(a)).collect();
                format!("{function}({})", args.join(", "))
            }
            Node::Item(fold, n) => {
                let Node::Fold { vars, .. } = &fold.0.node else { return Value::Named(String::new()) };
                self.fold(fold);
                return Value::Named(name(vars[n + 1]));
            }
            Node::Fold { .. } => String::new(),
        };
        Value::Computed(text)
    }

    fn guarded(&mut self, e: &E, buf: u32, at: &E, guard: &Guard, target: usize) -> Value {
        let (condition, default) = (self.emit(&guard.condition), self.emit(&guard.default));
        let ty = self.ty(e.ty());
        // The address may be out of range where the condition is false, so the first element is loaded in this case. A
        // branch is avoided, because loads in branches would wait for each other.
        let at = self.address(buf, at);
        let scope = &mut self.scopes[target];
        let name = format!("g{}", self.names);
        self.names += 1;
        let _ = writeln!(
            scope.code,
            "    let {name}: {ty} = select({default}, ld{buf}(select(0u, {at}, {condition})), {condition});"
        );
        Value::Named(name)
    }

    fn fold(&mut self, fold: &E) {
        let key = std::rc::Rc::as_ptr(&fold.0);
        if self.scopes.iter().any(|s| s.names.contains_key(&key)) {
            return;
        }
        let Node::Fold { count, vars, init, body } = &fold.0.node else { return };
        let target =
            self.scopes.iter().rposition(|s| s.vars.iter().any(|v| fold.0.free.contains(v))).unwrap_or(0);
        let count = self.emit(count);
        let first: Vec<String> = init.iter().map(|e| self.emit(e)).collect();
        let inner = self.scopes.split_off(target + 1);
        let code = self.block(vars, |w| w.assign(&vars[1..], body));
        for (var, (init, first)) in vars[1..].iter().zip(init.iter().zip(first)) {
            let ty = self.ty(init.ty());
            self.line(&format!("var {}: {ty} = {first};", name(*var)));
        }
        let i = name(vars[0]);
        self.line(&format!("for (var {i} = 0u; {i} < {count}; {i}++) {{\n{code}    }}"));
        self.scopes.extend(inner);
        self.scopes[target].names.insert(key, String::new());
    }

    /// Returns the text of a literal or parameter, for code outside of all blocks.
    pub(crate) fn outside(&mut self, e: &E) -> String {
        match &e.0.node {
            Node::Lit(bits) => literal(e.ty(), *bits, self.target),
            Node::Param(word) => self.parameter(e.ty(), *word),
            _ => {
                self.lacks = true;
                String::new()
            }
        }
    }

    fn parameter(&mut self, ty: Ty, word: u32) -> String {
        let (low, high) = (self.parameter_word(word), self.parameter_word(word + 1));
        match ty {
            Ty::Bool => format!("({low} != 0u)"),
            Ty::I32 => format!("bitcast<i32>({low})"),
            Ty::U32 => low,
            Ty::F32 => format!("bitcast<f32>({low})"),
            Ty::I64 if self.target.int64 => format!("i64((u64({high}) << 32u) | u64({low}))"),
            Ty::I64 => format!("vec2<u32>({low}, {high})"),
            Ty::F64 => format!("bitcast<f64>((u64({high}) << 32u) | u64({low}))"),
        }
    }

    /// The text of a parameter. The parameters of a bundle's member are addressed by the member's number.
    pub(super) fn parameter_word(&self, word: u32) -> String {
        let place = match &self.kernel.skeleton {
            Skeleton::Bundle(bundle) => bundle.places.get(word as usize).copied(),
            _ => None,
        };
        match place.unwrap_or(Place::Shared(word)) {
            Place::Shared(at) => word_at("", at),
            Place::Own(at) => word_at("own_words + ", at),
        }
    }

    fn pairs(&self, ty: Ty) -> bool {
        ty == Ty::I64 && !self.target.int64
    }

    fn unary(&mut self, op: Un, a: &E) -> String {
        let x = self.emit(a);
        let pairs = self.pairs(a.ty());
        match op {
            Un::Neg if pairs => format!("i64_neg({x})"),
            Un::Neg => format!("(-{x})"),
            Un::Abs if pairs => format!("i64_abs({x})"),
            Un::Abs => format!("abs({x})"),
            Un::Not => format!("!({x})"),
            Un::BitNot => format!("(~{x})"),
            Un::Sqrt => format!("sqrt({x})"),
            Un::Floor => format!("floor({x})"),
            Un::Ceil => format!("ceil({x})"),
            Un::Round => format!("round({x})"),
            Un::Trunc => format!("trunc({x})"),
            Un::Bits => format!("bitcast<u32>({x})"),
            Un::FromBits => format!("bitcast<f32>({x})"),
        }
    }

    fn binary(&mut self, op: Bin, a: &E, b: &E) -> String {
        let (x, y) = (self.emit(a), self.emit(b));
        if self.pairs(a.ty()) {
            return match op {
                Bin::Add => format!("i64_add({x}, {y})"),
                Bin::Sub => format!("i64_sub({x}, {y})"),
                Bin::Mul => format!("i64_mul({x}, {y})"),
                Bin::Div => format!("i64_div({x}, {y})"),
                Bin::Rem => format!("i64_rem({x}, {y})"),
                Bin::Min => format!("i64_min({x}, {y})"),
                Bin::Max => format!("i64_max({x}, {y})"),
                Bin::Eq => format!("all({x} == {y})"),
                Bin::Ne => format!("any({x} != {y})"),
                Bin::Lt => format!("i64_lt({x}, {y})"),
                Bin::Le => format!("!i64_lt({y}, {x})"),
                Bin::And | Bin::Or => String::new(),
                Bin::BitAnd => format!("({x} & {y})"),
                Bin::BitOr => format!("({x} | {y})"),
                Bin::BitXor => format!("({x} ^ {y})"),
                Bin::Shl => format!("i64_shl({x}, {y})"),
                Bin::Shr => format!("i64_shr({x}, {y})"),
            };
        }
        let bools = a.ty() == Ty::Bool;
        let sign = match op {
            Bin::Min if bools => "&",
            Bin::Max if bools => "|",
            Bin::Min => return format!("min({x}, {y})"),
            Bin::Max => return format!("max({x}, {y})"),
            // WGSL does not order bools.
            Bin::Lt if bools => return format!("(!{x} & {y})"),
            Bin::Le if bools => return format!("(!{x} | {y})"),
            Bin::BitXor if bools => "!=",
            Bin::Add => "+",
            // Compilers may use the ordered comparison for `!=`, which is false if an operand is NaN.
            Bin::Ne if a.ty().is_float() => return format!("!({x} == {y})"),
            Bin::Sub => "-",
            Bin::Mul => "*",
            Bin::Div => "/",
            Bin::Rem => "%",
            Bin::Eq => "==",
            Bin::Ne => "!=",
            Bin::Lt => "<",
            Bin::Le => "<=",
            Bin::And => "&&",
            Bin::Or => "||",
            Bin::BitAnd => "&",
            Bin::BitOr => "|",
            Bin::BitXor => "^",
            Bin::Shl => "<<",
            Bin::Shr => ">>",
        };
        format!("({x} {sign} {y})")
    }

    fn cast(&mut self, a: &E, to: Ty) -> String {
        let x = self.emit(a);
        let ty = self.ty(to);
        match (a.ty(), to) {
            (Ty::I64, Ty::F32) if !self.target.int64 => format!("i64_to_f32({x})"),
            (Ty::I64, Ty::F64) if !self.target.int64 => {
                format!("(f64(bitcast<i32>({x}.y)) * 4294967296.0lf + f64({x}.x))")
            }
            (Ty::I64, Ty::I32) if !self.target.int64 => format!("bitcast<i32>({x}.x)"),
            (Ty::I64, Ty::U32) if !self.target.int64 => format!("{x}.x"),
            (Ty::F32 | Ty::F64, Ty::I64) if !self.target.int64 => format!("i64_from_f32(f32({x}))"),
            (Ty::U32, Ty::I64) if !self.target.int64 => format!("vec2<u32>({x}, 0u)"),
            (Ty::I32, Ty::I64) if !self.target.int64 => format!("i64_from_i32({x})"),
            (Ty::Bool, Ty::I64) if !self.target.int64 => format!("vec2<u32>(select(0u, 1u, {x}), 0u)"),
            // Naga 30 sign-extends `u32` when it converts it to `i64`.
            (Ty::U32, Ty::I64) => format!("i64(u64({x}))"),
            (Ty::Bool, Ty::I64) => format!("select(0li, 1li, {x})"),
            (Ty::Bool, Ty::F64) => format!("select(0.0lf, 1.0lf, {x})"),
            (Ty::F32, Ty::I64) => format!("i64_of_f32({x})"),
            (Ty::F32, Ty::I32) => format!("i32_of_f32({x})"),
            _ => format!("{ty}({x})"),
        }
    }
}

enum Value {
    /// Text that is computed into a new variable.
    Computed(String),
    /// Name of an existing variable.
    Named(String),
}

/// A word of the parameters. `base` is added to the number of the word's vector.
pub(super) fn word_at(base: &str, at: u32) -> String {
    format!(
        "words.w[{base}{}{}].{}",
        at / 4,
        if base.is_empty() { "" } else { "u" },
        ["x", "y", "z", "w"][(at % 4) as usize]
    )
}

fn literal(ty: Ty, bits: u64, target: Target) -> String {
    let int = bits as i64;
    match ty {
        Ty::Bool => (bits != 0).to_string(),
        Ty::U32 => format!("{}u", bits as u32),
        Ty::I32 if int == i64::from(i32::MIN) => "(-2147483647i - 1i)".into(),
        Ty::I32 => format!("({int}i)"),
        Ty::I64 if !target.int64 => format!("vec2<u32>({}u, {}u)", bits as u32, (bits >> 32) as u32),
        Ty::I64 if int == i64::MIN => "(-9223372036854775807li - 1li)".into(),
        Ty::I64 => format!("({int}li)"),
        // WGSL has no literals for infinities and NaN, and lets compilers assume that they do not occur.
        Ty::F32 => {
            let value = f64::from_bits(bits) as f32;
            if value.is_finite() {
                format!("({value:?}f)")
            } else {
                format!("no_float({}u)", value.to_bits())
            }
        }
        Ty::F64 => {
            let value = f64::from_bits(bits);
            match value {
                v if v.is_finite() => format!("({v:?}lf)"),
                v => format!("f64(no_float({}u))", (v as f32).to_bits()),
            }
        }
    }
}
