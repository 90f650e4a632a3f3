"""A vision transformer written with einops layers and rearrangements, trained on random images."""

# /// script
# dependencies = ["einops==0.8.2"]
# ///

import torch
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import nn

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(self.norm(x)), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        scores = einsum(q, k, "b h i d, b h j d -> b h i j") * q.shape[-1] ** -0.5
        mixed = einsum(scores.softmax(-1), v, "b h i j, b h j d -> b h i d")
        return x + self.out(rearrange(mixed, "b h n d -> b n (h d)"))


class Mixer(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens, width):
        super().__init__()
        self.tokens = EinMix("b n c -> b m c", weight_shape="n m", bias_shape="m", n=tokens, m=tokens)
        self.channels = EinMix("b n c -> b n d", weight_shape="c d", bias_shape="d", c=width, d=width)

    def forward(self, x):
        return x + self.channels(torch.relu(self.tokens(x)))


class ViT(nn.Module):
    def __init__(self, width=48, patch=8, size=32, classes=5):
        super().__init__()
        self.embed = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch), nn.Linear(3 * patch**2, width)
        )
        self.token = nn.Parameter(torch.randn(width) * 0.02)
        tokens = (size // patch) ** 2 + 1
        self.blocks = nn.Sequential(Attention(width, 4), Mixer(tokens, width), Attention(width, 4))
        self.pool = Reduce("b n c -> b c", "mean")
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images):
        patches = self.embed(images)
        token = repeat(self.token, "c -> b 1 c", b=len(images))
        x, shapes = pack([token, patches], "b * c")
        token, patches = unpack(self.blocks(x), shapes, "b * c")
        return self.head(torch.cat([rearrange(token, "b 1 c -> b c"), self.pool(patches)], dim=-1))


images = torch.randn(64, 3, 32, 32)
labels = (
    reduce(images, "b c h w -> b c", "max").argmax(-1) + (reduce(images, "b c h w -> b", "mean") > 0)
).long()
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(100):
    batch = torch.randperm(64)[:32]
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(loss.item())

model.eval()
with torch.no_grad():
    for part in rearrange(images, "(parts b) c h w -> parts b c h w", parts=4):
        print("logits", reduce(model(part), "b k -> k", "mean").tolist())
