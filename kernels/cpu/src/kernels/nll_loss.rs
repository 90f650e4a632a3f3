//! The negative log-likelihood loss and its gradient.

use smallvec::smallvec;
use tandem_tracegraph::call::Call;
use tandem_tracegraph::node::Outputs;

use crate::kernels::kernel::{Addresses, Kernel, SendPtr};
use crate::kernels::norm::weights;
use crate::kernels::scratch::room;
use crate::kernels::{contiguous, count, each_row, int, norm, output};
use tandem_executor::host::HostKernels;
use tandem_executor::ir::Mem;
use tandem_executor::ops::losses::Reduction;

/// Sizes and options of a loss of `[N, C]` log-probabilities and `N` target classes, without class weights.
struct Shape {
    examples: usize,
    classes: i64,
    reduction: Reduction,
    ignored: i64,
}

impl Shape {
    /// Reads a call whose arguments from `first` on are: log-probabilities, target, weight, reduction, ignored
    /// class.
    fn of(call: &Call<'_>, first: usize) -> Option<Shape> {
        let x = contiguous(call, first, Mem::F32)?;
        let target = contiguous(call, first + 1, Mem::I64)?;
        let [examples, classes] = <[i64; 2]>::try_from(&x.sizes[..]).ok()?;
        let reduction =
            Reduction::of(int(call, first + 3)?).filter(|reduction| *reduction != Reduction::None)?;
        let plain = weights(call, first + 2, classes as usize)?.is_none() && target.sizes[..] == [examples];
        let examples = examples as usize;
        plain.then_some(Shape { examples, classes, reduction, ignored: int(call, first + 4)? })
    }

    /// Returns the class of each example, or `None` for an ignored example. The result is `None` if a class is out of
    /// range, which PyTorch's kernel reports, or if there is no memory.
    ///
    /// # Safety
    /// `first` points to `examples` integers, which nobody writes during the call.
    unsafe fn targets(&self, first: SendPtr<i64>) -> Option<Vec<Option<usize>>> {
        // SAFETY: there are `examples` integers from `first` on, which are not written.
        let targets = unsafe { first.read(0, self.examples) };
        let class = |target: &i64| match *target {
            ignored if ignored == self.ignored => Some(None),
            class => (0..self.classes).contains(&class).then_some(Some(class as usize)),
        };
        let mut classes = room(self.examples)?;
        for target in targets {
            classes.push(class(target)?);
        }
        Some(classes)
    }
}

/// `nll_loss_forward(self, target, weight, reduction, ignore_index)`.
pub fn forward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let shape = Shape::of(call, 0)?;
    let (x, target) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 1, Mem::I64)?);
    let (loss, total) = (norm::output(outputs, 0)?, norm::output(outputs, 1)?);
    let work = move |_: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        // SAFETY: window 1 is the target, of which `Shape::of` checked that it has `examples` integers. The kernel only
        // reads it.
        let Some(targets) = (unsafe { shape.targets(data.of(1)) }) else { return false };
        let classes = shape.classes as usize;
        // SAFETY: the lengths are those of the windows; only this call uses the outputs.
        let (x, loss, total) = unsafe {
            let number = |i: usize| &mut data.of::<f32>(i).slice(0, 1)[0];
            (data.of::<f32>(0).read(0, shape.examples * classes), number(2), number(3))
        };
        let counted = || targets.iter().enumerate().filter_map(|(i, class)| Some((i, (*class)?)));
        let sum: f64 = counted().map(|(i, class)| f64::from(-x[i * classes + class])).sum();
        let number = counted().count() as f64;
        *loss = if shape.reduction == Reduction::Mean { sum / number } else { sum } as f32;
        *total = number as f32;
        true
    };
    Some(Kernel::new(smallvec![x, target, loss, total], smallvec![], work))
}

/// `nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight)`.
pub fn backward(call: &Call<'_>, outputs: &Outputs) -> Option<Kernel> {
    let shape = Shape::of(call, 1)?;
    let (grad, target) = (contiguous(call, 0, Mem::F32)?, contiguous(call, 2, Mem::I64)?);
    let (total, to) = (contiguous(call, 6, Mem::F32)?, output(outputs).filter(|to| to.mem == Mem::F32)?);
    let single = count(&grad.sizes) == 1 && count(&total.sizes) == 1;
    if !single || count(&to.sizes) != shape.examples * shape.classes as usize {
        return None;
    }
    let work = move |host: &dyn HostKernels, data: Addresses<'_>, _: &[u64]| {
        // SAFETY: window 1 is the target, of which `Shape::of` checked that it has `examples` integers. The kernel only
        // reads it.
        let Some(targets) = (unsafe { shape.targets(data.of(1)) }) else { return false };
        // SAFETY: both windows have one element, of which nobody writes any while the kernel runs.
        let [grad, total] = [0, 2].map(|i| unsafe { data.of::<f32>(i).read(0, 1)[0] });
        let each = if shape.reduction == Reduction::Mean { -grad / total } else { -grad };
        let (to, classes) = (data.of::<f32>(3), shape.classes as usize);
        each_row(host, shape.examples, classes, &|begin, end| {
            for (i, class) in (begin..end).zip(&targets[begin..end]) {
                // SAFETY: the output has `examples * classes` elements; one thread alone uses each example.
                let to = unsafe { to.slice(i * classes, classes) };
                to.fill(0.0);
                if let Some(class) = class {
                    to[*class] = each;
                }
            }
        });
        true
    };
    Some(Kernel::new(smallvec![grad, target, total, to], smallvec![], work))
}
