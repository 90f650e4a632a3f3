//! Kernels that compute on tensors in one order, whatever the tensors' strides are.
//!
//! A tensor with images, channels and pixels has row-major or channels-last strides. If a kernel wants a row-major
//! tensor channels last, the device reorders the contents of the tensor's storage, which keeps the new order
//! ([`Kernel::or_channels_last`]). All other tensors are copied in the call.

use smallvec::SmallVec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::{OutSpec, Outputs};

use crate::channels_last::{Order, Planes};
use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::scratch::with_scratch;
use crate::kernels::tensor;
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::express::{Param, TensorGeometry, new_geometry};

/// The order of a window's elements; `None` if they are not floats or the window is not dense.
pub fn order(window: &TensorGeometry) -> Option<Order> {
    Order::of(&window.sizes, &window.strides).filter(|_| window.mem == Mem::F32)
}

/// The window of an argument in one of the orders.
pub fn given(call: &Call<'_>, arg: usize) -> Option<TensorGeometry> {
    tensor(call, arg).filter(|window| order(window).is_some())
}

/// The window of a new output in one of the orders.
pub fn made(outputs: &Outputs, number: usize) -> Option<TensorGeometry> {
    match outputs.outs.get(number)? {
        OutSpec::NewStorage { storage, meta, offset } => {
            new_geometry(*storage, meta, *offset).filter(|window| order(window).is_some())
        }
        _ => None,
    }
}

/// An output that the call's output mask may exclude: `Some(None)` if it is undefined.
pub fn wanted(outputs: &Outputs, number: usize) -> Option<Option<TensorGeometry>> {
    match outputs.outs.get(number)? {
        OutSpec::Undefined => Some(None),
        _ => made(outputs, number).map(Some),
    }
}

/// A tensor of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Number of the window.
    pub window: usize,
    /// Whether the kernel writes all of the tensor. Otherwise it reads the tensor.
    pub is_written: bool,
    /// The order that the code computes on.
    pub wanted: Order,
}

impl Tensor {
    /// A tensor that is read.
    pub fn read(window: usize, wanted: Order) -> Tensor {
        Tensor { window, is_written: false, wanted }
    }

    /// A tensor that is written.
    pub fn written(window: usize, wanted: Order) -> Tensor {
        Tensor { window, is_written: true, wanted }
    }
}

/// A tensor on which a kernel computes in another order than its strides say.
#[derive(Clone, Copy)]
struct Permuted {
    tensor: Tensor,
    planes: Planes,
}

/// The kernel whose code computes on each of `tensors` in the order `wanted`.
pub fn in_orders(
    windows: SmallVec<[TensorGeometry; 4]>,
    params: SmallVec<[Param; 2]>,
    tensors: &[Tensor],
    compute: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Clone + Send + Sync + 'static,
) -> Kernel {
    let permuted = tensors.iter().filter_map(|tensor| {
        let window = &windows[tensor.window];
        let planes = Planes::of(&window.sizes)?;
        (order(window) != Some(tensor.wanted)).then_some(Permuted { tensor: *tensor, planes })
    });
    let permuted: Vec<Permuted> = permuted.collect();
    if permuted.is_empty() {
        return Kernel::new(windows, params, compute);
    }
    let (last, copied): (Vec<Permuted>, Vec<Permuted>) =
        permuted.iter().partition(|permuted| permuted.tensor.wanted == Order::ChannelsLast);
    let planes: Vec<(usize, Planes)> =
        last.iter().map(|permuted| (permuted.tensor.window, permuted.planes)).collect();
    let kernel = Kernel::new(windows, params, on_copies(permuted, compute.clone()));
    match planes.is_empty() {
        true => kernel,
        false => kernel.or_channels_last(&planes, true, on_copies(copied, compute)),
    }
}

/// The kernel with code for each order, which computes on `tensors`. If all strides of the tensors are row-major, the
/// order of their contents decides. Otherwise `channels_last` computes on each tensor in the order `wanted`.
pub fn in_either_order(
    windows: SmallVec<[TensorGeometry; 4]>,
    params: SmallVec<[Param; 2]>,
    tensors: &[Tensor],
    row_major: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static,
    channels_last: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Clone + Send + Sync + 'static,
) -> Kernel {
    if tensors.iter().any(|tensor| order(&windows[tensor.window]) == Some(Order::ChannelsLast)) {
        return in_orders(windows, params, tensors, channels_last);
    }
    let planes =
        tensors.iter().map(|tensor| Some((tensor.window, Planes::of(&windows[tensor.window].sizes)?)));
    let planes: Option<SmallVec<[(usize, Planes); 3]>> = planes.collect();
    let kernel = Kernel::new(windows, params, row_major);
    match planes {
        Some(planes) => kernel.or_channels_last(&planes, false, channels_last),
        None => kernel,
    }
}

/// The code that computes on each of `tensors` in the order `wanted`. The tensors in another order are copied.
fn on_copies(
    permuted: Vec<Permuted>,
    compute: impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static,
) -> impl Fn(&dyn HostKernels, Addresses<'_>, &[u64]) -> bool + Send + Sync + 'static {
    let room = permuted.iter().map(|permuted| permuted.planes.len()).sum();
    move |host, data, params| {
        if permuted.is_empty() {
            return compute(host, data, params);
        }
        with_scratch(room, |mut scratch| {
            let mut copies: SmallVec<[(usize, SendPtr<f32>); 4]> = SmallVec::new();
            for Permuted { tensor, planes } in &permuted {
                let (copy, rest) = std::mem::take(&mut scratch).split_at_mut(planes.len());
                let copy = SendPtr(copy.as_mut_ptr());
                if !tensor.is_written {
                    // SAFETY: the window has the planes' sizes, and the copy is as large.
                    unsafe { planes.reorder(host, data.of(tensor.window).get(), copy.get(), tensor.wanted) };
                }
                copies.push((tensor.window, copy));
                scratch = rest;
            }
            let done = data.with(&copies, |data| compute(host, data, params));
            for (Permuted { tensor, planes }, (_, copy)) in permuted.iter().zip(&copies) {
                if tensor.is_written {
                    let to = data.of(tensor.window).get();
                    // SAFETY: the window has the planes' sizes, and the copy is as large.
                    unsafe { planes.reorder(host, copy.get(), to, tensor.wanted.other()) };
                }
            }
            done
        })
    }
}
