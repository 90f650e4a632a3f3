"""Trains E(n)-equivariant graph networks to predict energies of particles, and to move points."""

# /// script
# dependencies = ["egnn-pytorch==0.2.8"]
# ///

import torch
from egnn_pytorch import EGNN, EGNN_Network
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = EGNN_Network(
            num_tokens=4,
            num_positions=10,
            dim=16,
            depth=2,
            num_nearest_neighbors=4,
            coor_weights_clamp_value=2.0,
            num_adj_degrees=2,
            adj_dim=4,
            global_linear_attn_every=2,
            global_linear_attn_heads=2,
            global_linear_attn_dim_head=8,
            num_global_tokens=2,
            norm_coors=True,
        )
        self.head = nn.Linear(16, 1)

    def forward(self, kinds, positions, adjacency, mask):
        features, _ = self.network(kinds, positions, adj_mat=adjacency, mask=mask)
        return (self.head(features).squeeze(-1) * mask).sum(1)


model = Energy()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
chain = torch.arange(10)
adjacency = (chain[:, None] - chain[None]).abs() == 1
for step in range(50):
    kinds = torch.randint(0, 4, (8, 10))
    positions = torch.randn(8, 10, 3)
    mask = chain < torch.randint(7, 11, (8, 1))
    pairs = mask[:, :, None] & mask[:, None] & ~torch.eye(10).bool()
    energy = (torch.exp(-torch.cdist(positions, positions)) * pairs).sum((1, 2)) / 10
    loss = F.mse_loss(model(kinds, positions, adjacency, mask), energy)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print("energy", step, loss.item())

layers = nn.ModuleList(
    [EGNN(dim=4, edge_dim=1, m_dim=8, fourier_features=2, soft_edges=True) for _ in range(2)]
)
optimizer = torch.optim.Adam(layers.parameters(), lr=3e-3)


def move(positions):
    features, edges = torch.ones(*positions.shape[:2], 4), torch.cdist(positions, positions).unsqueeze(-1)
    for layer in layers:
        features, positions = layer(features, positions, edges)
    return positions


for step in range(40):
    positions = torch.randn(8, 6, 3)
    loss = F.mse_loss(move(positions), positions.mean(1, keepdim=True).expand_as(positions))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print("move", step, loss.item())

with torch.no_grad():
    rotation = torch.linalg.qr(torch.randn(3, 3)).Q
    positions = torch.randn(2, 6, 3)
    print("equivariant", torch.allclose(move(positions @ rotation), move(positions) @ rotation, atol=1e-4))
