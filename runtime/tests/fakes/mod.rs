//! Tandem without PyTorch, Python or a device: fake operators on one-dimensional f32 tensors, and two machines
//! that run the same program, one through the engine, as the bridge does, and one imperatively.
#![allow(dead_code, unused_imports)] // Each test uses only some of it.

pub mod kernels;
pub mod machine;

use std::cell::RefCell;
use std::rc::Rc;

use tandem_executor::host::Buffer;
use tandem_runtime::error::CallError;
use tandem_runtime::storage::DEATHS;
use tandem_tracegraph::ids::StorageId;

pub use kernels::Op;
pub use machine::{CoExecution, Imperative};

/// PyTorch's number for float32.
pub const F32: u8 = 6;

/// Storage of a tensor's elements. When the last reference is dropped, the storage dies as with PyTorch's deleter.
pub enum Store {
    Tandem(StorageId),
    Host(Buffer),
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Store::Tandem(id) = self {
            DEATHS.push(*id);
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    pub sizes: Vec<i64>,
    pub strides: Vec<i64>,
    pub offset: i64,
}

impl Window {
    pub fn dense(sizes: &[i64]) -> Window {
        Window { sizes: sizes.to_vec(), strides: vec![1; sizes.len()], offset: 0 }
    }
}

/// Tensor object: a window, which `out=` may change, of a shared store.
#[derive(Clone)]
pub struct Tensor {
    pub store: Rc<Store>,
    pub window: Rc<RefCell<Window>>,
    pub requires_grad: bool,
}

impl Tensor {
    pub fn new(store: Rc<Store>, window: Window) -> Tensor {
        Tensor { store, window: Rc::new(RefCell::new(window)), requires_grad: false }
    }

    /// Returns the number of elements, which is 1 for a tensor without dimensions.
    pub fn len(&self) -> i64 {
        self.window.borrow().sizes.iter().product()
    }

    /// Returns whether the window covers all of a host store.
    pub fn is_whole(&self) -> bool {
        let Store::Host(buffer) = &*self.store else { return false };
        self.window.borrow().offset == 0 && kernels::values_of(buffer).len() as i64 == self.len()
    }

    /// Returns a view of every `step`-th of `len` elements from `start`.
    pub fn slice(&self, start: i64, len: i64, step: i64) -> Tensor {
        let w = self.window.borrow();
        let stride = w.strides[0];
        // Loops slice one-element windows repeatedly. Such a window's stride is irrelevant, and must not overflow.
        let strides = vec![if len > 1 { stride * step } else { 1 }];
        let window = Window { sizes: vec![len], strides, offset: w.offset + start * stride };
        Tensor { requires_grad: self.requires_grad, ..Tensor::new(self.store.clone(), window) }
    }

    pub fn with_grad(mut self) -> Tensor {
        self.requires_grad = true;
        self
    }
}

/// Argument of an op in a program.
#[derive(Clone)]
pub enum V<'a> {
    None,
    T(&'a Tensor),
    List(Vec<&'a Tensor>),
    I(i64),
    F(f64),
    B(bool),
    C(f64, f64),
    Str(&'a str),
    Ints(&'a [i64]),
    Floats(&'a [f64]),
    Bools(&'a [u8]),
    Scalars(Vec<V<'a>>),
    Generator(&'a Buffer),
}

/// Machine that runs a program. `line` is the source line of a call.
pub trait Machine {
    fn call(&mut self, line: u32, op: Op, args: &[V<'_>]) -> Result<Vec<Tensor>, CallError>;

    /// Creates a tensor in host memory.
    fn host(&self, values: &[f32]) -> Tensor;

    /// Creates a device tensor that no op made, such as a parameter.
    fn state(&mut self, values: &[f32]) -> Tensor;

    /// Returns a tensor's values without a fetch.
    fn peek(&self, t: &Tensor) -> Vec<f32>;

    /// Returns the value that the last call returned to the host.
    fn host_value(&self) -> f64 {
        kernels::take_host_value()
    }

    /// Ends an iteration.
    fn step(&mut self);

    fn one(&mut self, line: u32, op: Op, args: &[V<'_>]) -> Tensor {
        self.call(line, op, args).unwrap_or_else(|e| panic!("line {line}: {e}")).remove(0)
    }

    fn add(&mut self, line: u32, a: &Tensor, b: &Tensor, alpha: f64) -> Tensor {
        self.one(line, Op::Add, &[V::T(a), V::T(b), V::F(alpha)])
    }

    fn relu(&mut self, line: u32, a: &Tensor) -> Tensor {
        self.one(line, Op::Relu, &[V::T(a)])
    }

    fn mul_(&mut self, line: u32, a: &Tensor, b: &Tensor) {
        self.one(line, Op::Mul_, &[V::T(a), V::T(b)]);
    }

    fn uniform(&mut self, line: u32, n: i64) -> Tensor {
        self.one(line, Op::Uniform, &[V::Ints(&[n]), V::None])
    }

    /// Copies host values to a new tensor on the device.
    fn feed(&mut self, line: u32, values: &[f32]) -> Tensor {
        let host = self.host(values);
        self.one(line, Op::ToDevice, &[V::T(&host)])
    }

    /// Returns `t[0].item()`.
    fn item(&mut self, line: u32, t: &Tensor) -> Result<f64, CallError> {
        self.call(line, Op::Item, &[V::T(t)])?;
        Ok(self.host_value())
    }

    /// Returns all values, like `t.cpu()`.
    fn fetch(&mut self, line: u32, t: &Tensor) -> Result<Vec<f32>, CallError> {
        let to = self.host(&vec![f32::NAN; t.len() as usize]);
        self.call(line, Op::Copy_, &[V::T(&to), V::T(t)])?;
        let Store::Host(buffer) = &*to.store else { unreachable!("a host tensor") };
        Ok(kernels::values_of(buffer))
    }
}

/// Computes a = w + n w, b = relu(a), w *= w + b / 8 for a number n, and returns b.
pub fn chain(m: &mut dyn Machine, w: &Tensor, line: u32, number: f64) -> Tensor {
    let a = m.add(line, w, w, number);
    let b = m.relu(line + 1, &a);
    let c = m.add(line + 2, w, &b, 0.125);
    m.mul_(line + 3, w, &c);
    b
}
