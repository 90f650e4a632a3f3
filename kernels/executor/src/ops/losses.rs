//! Expressions of losses and of their derivatives, which both executors compile.

use crate::ir::E;

/// A loss of a prediction and a target that has an operator for its derivative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// `mse_loss`: the square of the difference.
    Mse,
    /// `smooth_l1_loss`: quadratic for differences below `beta`, linear for others.
    SmoothL1,
    /// `huber_loss`: quadratic for differences up to `delta`, linear for others.
    Huber,
    /// `soft_margin_loss`: the logistic loss of a target that is 1 or -1.
    SoftMargin,
    /// `binary_cross_entropy` of a probability, with logarithms of at least -100.
    BinaryCrossEntropy,
}

/// Reduction of the elements' losses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduction {
    /// All losses are returned.
    None,
    /// The mean is returned.
    Mean,
    /// The sum is returned.
    Sum,
}

impl Reduction {
    /// The reduction that an integer stands for, as in ATen's `Reduction.h`.
    pub fn of(number: i64) -> Option<Reduction> {
        match number {
            0 => Some(Reduction::None),
            1 => Some(Reduction::Mean),
            2 => Some(Reduction::Sum),
            _ => None,
        }
    }
}

impl Loss {
    /// The loss of a prediction `x` and a target `t`. `number` is the `beta` or `delta` of losses that have one.
    pub fn value(self, x: &E, t: &E, number: &E) -> E {
        let d = x - t;
        match self {
            Loss::Mse => &d * &d,
            Loss::SmoothL1 => {
                let z = d.abs();
                z.lt(number).select(0.5 * &z * &z / number, &z - 0.5 * number)
            }
            Loss::Huber => {
                let z = d.abs();
                z.le(number).select(0.5 * &z * &z, number * (&z - 0.5 * number))
            }
            Loss::SoftMargin => (-(t * x)).exp().f("log1p_"),
            Loss::BinaryCrossEntropy => {
                let (yes, no) = (x.log().max(-100.0), (-x).f("log1p_").max(-100.0));
                (t - 1.0) * no - t * yes
            }
        }
    }

    /// The derivative with respect to the prediction, times the gradient `g` of the loss.
    pub fn derivative(self, g: &E, x: &E, t: &E, number: &E) -> E {
        let d = x - t;
        match self {
            Loss::Mse => 2.0 * &d * g,
            Loss::SmoothL1 => {
                let inner = &d * g / number;
                d.le(-number).select(-g, d.ge(number).select(g, inner))
            }
            Loss::Huber => {
                let inner = &d * g;
                d.lt(-number).select(-g * number, d.gt(number).select(g * number, inner))
            }
            Loss::SoftMargin => {
                let z = (-(t * x)).exp();
                -(t * &z) * g / (&z + 1.0)
            }
            Loss::BinaryCrossEntropy => g * &d / ((1.0 - x) * x).max(1e-12),
        }
    }
}

/// `binary_cross_entropy_with_logits` of a logit `x` and a target `t`. `positive` is the weight of targets of 1. PyTorch
/// differentiates this loss with other operators.
pub fn cross_entropy_with_logits(x: &E, t: &E, positive: Option<&E>) -> E {
    let log = x.min(0.0) - (-x.abs()).exp().f("log1p_");
    let log = match positive {
        Some(positive) => log * ((positive - 1.0) * t + 1.0),
        None => log,
    };
    (1.0 - t) * x - log
}
