"""Trains vision transformers: supervised, as a masked autoencoder, and on packed images of several sizes."""

# /// script
# dependencies = ["vit-pytorch==1.26.11"]
# ///

import torch
from torch.nn import functional as F
from vit_pytorch import MAE, SimpleViT, ViT
from vit_pytorch.cct import CCT
from vit_pytorch.extractor import Extractor
from vit_pytorch.na_vit import NaViT
from vit_pytorch.recorder import Recorder

torch.manual_seed(0)


def images(count, size=32):
    """Noise with a bright square in one of the four quadrants."""
    x, label = torch.randn(count, 3, size, size) * 0.5, torch.randint(0, 4, (count,))
    half = size // 2
    for image, quadrant in zip(x, label.tolist(), strict=True):
        row, column = divmod(quadrant, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.7
    return x, label


shape = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 4,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 64,
}


def train(name, parameters, loss_of, steps):
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    for step in range(steps):
        loss = loss_of(*images(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(name, step, loss.item())


vit = ViT(**shape, dim_head=16, dropout=0.1, emb_dropout=0.1, pool="cls")
train("vit", vit.parameters(), lambda x, y: F.cross_entropy(vit(x), y), 40)

simple = SimpleViT(**shape, dim_head=16)
train("simple", simple.parameters(), lambda x, y: F.cross_entropy(simple(x), y), 30)

encoder = ViT(**shape, dim_head=16, pool="mean")
mae = MAE(
    encoder=encoder, masking_ratio=0.75, decoder_dim=32, decoder_depth=1, decoder_heads=2, decoder_dim_head=16
)
train("mae", mae.parameters(), lambda x, y: mae(x), 30)

cct = CCT(
    img_size=32, embedding_dim=32, n_conv_layers=2, kernel_size=3, stride=2, padding=1, pooling_kernel_size=3,
    pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=4,
)  # fmt: skip
train("cct", cct.parameters(), lambda x, y: F.cross_entropy(cct(x), y), 30)

sizes = [(32, 32), (16, 24), (24, 8)]
navit = NaViT(**shape, dim_head=16, token_dropout_prob=0.1)
optimizer = torch.optim.AdamW(navit.parameters(), lr=2e-3)
for step in range(10):
    batch = [[torch.randn(3, *sizes[0]), torch.randn(3, *sizes[1])], [torch.randn(3, *sizes[2])]]
    loss = F.cross_entropy(navit(batch), torch.tensor([0, 1, 2]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print("navit", step, loss.item())

vit.eval()
x, y = images(64)
with torch.no_grad():
    print("accuracy", (vit(x).argmax(1) == y).float().mean().item())
    _, attention = Recorder(vit)(x[:2])
    print("attention", tuple(attention.shape), attention[:, :, :, 0].max().item())
    print("embeddings", Extractor(vit, return_embeddings_only=True)(x[:2]).norm().item())
