"""Solves differential equations with physics-informed networks, and learns an operator with DeepONet."""

# /// script
# dependencies = ["deepxde==1.15.0"]
# ///

import os

os.environ["DDE_BACKEND"] = "pytorch"

import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()):
    import deepxde as dde
import numpy as np
import torch

dde.config.set_random_seed(0)


def train(model, iterations, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        return model.train(iterations=iterations, display_every=10, **options)


def compile_model(model, *arguments, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        model.compile(*arguments, **options)


def network(layers):
    return dde.nn.FNN(layers, "tanh", "Glorot uniform")


# The Poisson equation -u'' = pi^2 sin(pi x).
def poisson(x, y):
    return -dde.grad.hessian(y, x) - np.pi**2 * torch.sin(np.pi * x)


line = dde.geometry.Interval(-1, 1)
boundary = dde.icbc.DirichletBC(line, lambda x: 0, lambda _, on_boundary: on_boundary)
data = dde.data.PDE(line, poisson, boundary, 16, 2, solution=lambda x: np.sin(np.pi * x), num_test=50)
model = dde.Model(data, network([1, 20, 20, 1]))
compile_model(model, "adam", lr=5e-3, metrics=["l2 relative error"])
history, _ = train(model, 60)
for step, losses, metrics in zip(history.steps, history.loss_train, history.metrics_test, strict=True):
    print("poisson", step, *map(float, losses), *map(float, metrics))
dde.optimizers.config.set_LBFGS_options(maxiter=10)
compile_model(model, "L-BFGS")
with contextlib.redirect_stdout(io.StringIO()):
    history, _ = model.train()
print("lbfgs", *map(float, history.loss_train[-1]))


# The diffusion equation, with its coefficient unknown.
coefficient = dde.Variable(2.0)


def diffusion(x, y):
    return dde.grad.jacobian(y, x, i=0, j=1) - coefficient * dde.grad.hessian(y, x, i=0, j=0)


domain = dde.geometry.GeometryXTime(dde.geometry.Interval(0, 1), dde.geometry.TimeDomain(0, 1))


def exact(x):
    return np.exp(-(np.pi**2) * 0.3 * x[:, 1:]) * np.sin(np.pi * x[:, :1])


observed = np.random.rand(30, 2).astype(np.float32)
conditions = [
    dde.icbc.DirichletBC(domain, lambda x: 0, lambda _, on_boundary: on_boundary),
    dde.icbc.IC(domain, exact, lambda _, on_initial: on_initial),
    dde.icbc.PointSetBC(observed, exact(observed)),
]
data = dde.data.TimePDE(domain, diffusion, conditions, num_domain=40, num_boundary=10, num_initial=10)
model = dde.Model(data, network([2, 20, 20, 1]))
compile_model(model, "adam", lr=1e-2, external_trainable_variables=coefficient, loss_weights=[1, 10, 10, 10])
history, _ = train(model, 60)
print("diffusion", *map(float, history.loss_train[-1]), "coefficient", coefficient.item())

# The antiderivative operator, from random functions.
space = dde.data.GRF(length_scale=0.3, N=50)
features = space.random(60)
sensors = np.linspace(0, 1, 20)[:, None]
inputs = space.eval_batch(features, sensors).astype(np.float32)
outputs = (np.cumsum(inputs, 1) / 20).astype(np.float32)
data = dde.data.TripleCartesianProd(
    (inputs[:50], sensors.astype(np.float32)),
    outputs[:50],
    (inputs[50:], sensors.astype(np.float32)),
    outputs[50:],
)
model = dde.Model(data, dde.nn.DeepONetCartesianProd([20, 24, 24], [1, 24, 24], "relu", "Glorot normal"))
compile_model(model, "adam", lr=3e-3, metrics=["mean l2 relative error"])
history, _ = train(model, 60)
for step, losses, metrics in zip(history.steps, history.loss_train, history.metrics_test, strict=True):
    print("operator", step, *map(float, losses), *map(float, metrics))
