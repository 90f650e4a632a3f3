"""Trains a Perceiver classifier of images, and a Perceiver IO that answers queries about a set of points."""

# /// script
# dependencies = ["perceiver-pytorch==0.11.0"]
# ///

import torch
from perceiver_pytorch import Perceiver, PerceiverIO
from torch.nn import functional as F

torch.manual_seed(0)

classifier = Perceiver(
    input_channels=1, input_axis=2, num_freq_bands=4, max_freq=10, depth=2, num_latents=8, latent_dim=32,
    latent_heads=2, cross_dim_head=16, latent_dim_head=16, num_classes=2, attn_dropout=0.1, ff_dropout=0.1,
    weight_tie_layers=True, self_per_cross_attn=1,
)  # fmt: skip
optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3)
for step in range(60):
    images = torch.randn(16, 12, 12, 1) * 0.5
    labels = torch.randint(0, 2, (16,))
    images[labels == 1, :6] += 1
    loss = F.cross_entropy(classifier(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        print("classifier", step, loss.item())

io = PerceiverIO(
    dim=4, queries_dim=4, logits_dim=2, depth=2, num_latents=8, latent_dim=32, cross_heads=1, latent_heads=2,
    cross_dim_head=16, latent_dim_head=16, decoder_ff=True, seq_dropout_prob=0.1,
)  # fmt: skip
optimizer = torch.optim.AdamW(io.parameters(), lr=2e-3)
for step in range(60):
    points = torch.rand(8, 20, 4)
    queries = torch.rand(8, 10, 4)
    mask = torch.ones(8, 20).bool()
    mask[:4, 15:] = False
    target = torch.stack([points.mean(1, keepdim=True)[..., 0] + queries[..., 0], queries[..., 1].sin()], -1)
    loss = F.mse_loss(io(points, mask=mask, queries=queries), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        print("queries", step, loss.item())
