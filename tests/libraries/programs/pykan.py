"""Fits a Kolmogorov-Arnold network to a formula, prunes it, refines its grid and makes it symbolic."""

# /// script
# dependencies = ["pykan==0.2.8", "pandas"]
# ///

import contextlib
import io
import tempfile

import torch
from kan import KAN, create_dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def formula(x):
    return torch.exp(torch.sin(torch.pi * x[:, [0]]) + x[:, [1]] ** 2)


def fit(model, **options):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return model.fit(dataset, **options)


dataset = create_dataset(formula, n_var=2, train_num=200, test_num=100, device=device, seed=0)
folder = tempfile.TemporaryDirectory()
model = KAN(width=[2, 3, 1], grid=3, k=3, seed=0, auto_save=False, ckpt_path=folder.name, device=device)

# LBFGS amplifies roundings at once, so Adam is the first.
history = fit(model, opt="Adam", steps=30, lr=0.01, batch=64)
print("adam", [float(x) for x in history["train_loss"]])
history = fit(model, opt="LBFGS", steps=6, lamb=0.001)
print("lbfgs", [float(x) for x in history["train_loss"]], [float(x) for x in history["test_loss"]])

with contextlib.redirect_stdout(io.StringIO()):
    model = model.prune(node_th=1e-2, edge_th=1e-3)
print("pruned", model.width)
with contextlib.redirect_stdout(io.StringIO()):
    model = model.refine(5)
history = fit(model, opt="LBFGS", steps=4)
print("refined", [float(x) for x in history["train_loss"]], [float(x) for x in history["test_loss"]])

with contextlib.redirect_stdout(io.StringIO()):
    model.fix_symbolic(0, 0, 0, "sin", verbose=False)
    model.fix_symbolic(0, 1, 0, "x^2", verbose=False)
history = fit(model, opt="LBFGS", steps=3, update_grid=False)
print("symbolic", [float(x) for x in history["train_loss"]])
print("output", model(dataset["test_input"][:4]).flatten().tolist())
