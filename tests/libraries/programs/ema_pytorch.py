"""Keeps moving averages of a network in training, and averages of several widths after the fact."""

# /// script
# dependencies = ["ema-pytorch==0.8.3"]
# ///

import tempfile

import torch
from ema_pytorch import EMA, PostHocEMA
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, 1))
averages = {
    "plain": EMA(model, beta=0.95, update_after_step=10, update_every=2),
    "foreach": EMA(model, beta=0.95, update_after_step=0, update_every=1, use_foreach=True),
    "switch": EMA(model, beta=0.9, update_after_step=5, update_every=1, update_model_with_ema_every=40),
}
folder = tempfile.TemporaryDirectory()
post_hoc = PostHocEMA(
    model,
    sigma_rels=(0.05, 0.28),
    update_every=2,
    checkpoint_every_num_steps=20,
    checkpoint_folder=folder.name,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
weight = torch.randn(4, 1)


def batch(count):
    x = torch.randn(count, 4)
    return x, (x @ weight).sin() + 0.3 * torch.randn(count, 1)


test_x, test_y = batch(256)
for step in range(100):
    x, y = batch(32)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for average in (*averages.values(), post_hoc):
        average.update()
    if step % 20 == 19:
        model.eval()
        with torch.no_grad():
            losses = {name: F.mse_loss(average(test_x), test_y).item() for name, average in averages.items()}
            print("step", step, loss.item(), "model", F.mse_loss(model(test_x), test_y).item(), losses)
        model.train()

with torch.no_grad():
    for sigma in (0.1, 0.15):
        synthesized = post_hoc.synthesize_ema_model(sigma_rel=sigma)
        print("sigma", sigma, F.mse_loss(synthesized(test_x), test_y).item())
folder.cleanup()
