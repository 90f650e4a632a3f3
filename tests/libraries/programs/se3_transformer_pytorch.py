"""Trains an SE(3)-transformer on points, with vectors as outputs that turn with its inputs."""

# /// script
# dependencies = ["se3-transformer-pytorch==0.9.0"]
# ///

import os

os.environ["CLEAR_CACHE"] = "1"  # with files of bases from earlier runs, it prints other lines

import torch
from se3_transformer_pytorch import SE3Transformer
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

model = SE3Transformer(
    num_tokens=5,
    dim=8,
    heads=2,
    dim_head=4,
    depth=1,
    num_degrees=2,
    output_degrees=2,
    num_neighbors=4,
    valid_radius=10,
    reduce_dim_out=True,
    edge_dim=2,
    num_edge_tokens=3,
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(15):
    tokens = torch.randint(0, 5, (2, 8))
    positions = torch.randn(2, 8, 3)
    edges = torch.randint(0, 3, (2, 8, 8))
    mask = torch.ones(2, 8).bool()
    mask[1, 6:] = False
    target = positions.mean(1, keepdim=True) - positions
    loss = F.mse_loss(model(tokens, positions, mask, edges=edges, return_type=1)[mask], target[mask])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 3 == 2:
        print("step", step, loss.item())

model.eval()
with torch.no_grad():
    rotation = torch.linalg.qr(torch.randn(3, 3)).Q
    rotation = rotation * torch.linalg.det(rotation)
    vectors = model(tokens, positions, mask, edges=edges, return_type=1)
    turned = model(tokens, positions @ rotation, mask, edges=edges, return_type=1)
    print("equivariant", torch.allclose(turned, vectors @ rotation, atol=1e-4), vectors[0, 0].tolist())
