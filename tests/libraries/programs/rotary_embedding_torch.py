"""Trains attention with rotary embeddings: in a sequence, with xpos, axial, and with cached keys."""

# /// script
# dependencies = ["rotary-embedding-torch==0.9.1"]
# ///

import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rotary.use_xpos:
            q, k = self.rotary.rotate_queries_and_keys(q, k)
        else:
            q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


# Copies the token three positions before.
for name, rotary in {
    "plain": RotaryEmbedding(dim=16),
    "learned": RotaryEmbedding(dim=16, learned_freq=True),
    "xpos": RotaryEmbedding(dim=16, use_xpos=True, xpos_scale_base=64),
    "interpolated": RotaryEmbedding(dim=16, interpolate_factor=2.0),
}.items():
    model = nn.Sequential(
        nn.Embedding(10, 32), Attention(32, 2, rotary), Attention(32, 2, rotary), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(40):
        tokens = torch.randint(0, 10, (16, 16 + step % 3))
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, 3:].flatten(0, 1), tokens[:, :-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(name, step, loss.item())

with torch.no_grad():
    axial = RotaryEmbedding(dim=8, freqs_for="pixel", max_freq=64)
    queries = torch.randn(2, 12, 10, 16)
    rotated = apply_rotary_emb(axial.get_axial_freqs(12, 10), queries)
    print("axial", rotated.square().sum().item(), rotated[0, 3, 4].tolist())

    rotary = RotaryEmbedding(dim=16)
    keys = torch.empty(1, 2, 0, 16)
    for _ in range(5):
        query = torch.randn(1, 2, 1, 16)
        keys = torch.cat([keys, torch.randn(1, 2, 1, 16)], dim=2)
        rotated_query, rotated_keys = rotary.rotate_queries_with_cached_keys(query, keys)
        print("cached", (rotated_query @ rotated_keys.transpose(-1, -2)).flatten().tolist())
