"""Trains autoencoders of signals with each kind of quantizer: codebooks, residual, scalar and lookup-free."""

# /// script
# dependencies = ["vector-quantize-pytorch==1.32.0"]
# ///

import torch
from torch import nn
from torch.nn import functional as F
from vector_quantize_pytorch import FSQ, LFQ, LatentQuantize, ResidualFSQ, ResidualVQ, SimVQ, VectorQuantize

torch.manual_seed(0)


def signals(count):
    t = torch.linspace(0, 6.28, 32)
    frequency, phase = torch.randint(1, 4, (count, 1)), torch.rand(count, 1) * 6.28
    return (frequency * t + phase).sin().unsqueeze(1)


quantizers = {
    "vq": VectorQuantize(dim=8, codebook_size=32, decay=0.8, commitment_weight=1.0),
    "kmeans": VectorQuantize(
        dim=8, codebook_size=32, kmeans_init=True, kmeans_iters=4, threshold_ema_dead_code=1
    ),
    "cosine": VectorQuantize(dim=8, codebook_size=32, codebook_dim=4, use_cosine_sim=True),
    "learnable": VectorQuantize(dim=8, codebook_size=32, learnable_codebook=True, ema_update=False, heads=2),
    "rotation": VectorQuantize(dim=8, codebook_size=32, rotation_trick=True, orthogonal_reg_weight=1.0),
    "residual": ResidualVQ(dim=8, codebook_size=16, num_quantizers=3, quantize_dropout=True),
    "sim": SimVQ(dim=8, codebook_size=32),
    "fsq": FSQ(levels=[5, 5, 4], dim=8),
    "residual fsq": ResidualFSQ(dim=8, levels=[4, 4], num_quantizers=2),
    "lfq": LFQ(dim=8, codebook_size=64, entropy_loss_weight=0.02),
    "latent": LatentQuantize(levels=[5, 5, 4], dim=8),
}
test = signals(64)

for name, quantizer in quantizers.items():
    encoder = nn.Sequential(nn.Conv1d(1, 16, 4, 2, 1), nn.GELU(), nn.Conv1d(16, 8, 4, 2, 1))
    decoder = nn.Sequential(nn.ConvTranspose1d(8, 16, 4, 2, 1), nn.GELU(), nn.ConvTranspose1d(16, 1, 4, 2, 1))
    model = nn.ModuleList([encoder, quantizer, decoder])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def quantize(x, encoder=encoder, quantizer=quantizer):
        quantized, indices, *losses = quantizer(encoder(x).transpose(1, 2))
        return quantized.transpose(1, 2), indices, losses[0].sum() if losses else 0.0

    for step in range(12):
        x = signals(32)
        quantized, indices, commitment = quantize(x)
        loss = F.mse_loss(decoder(quantized), x) + commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 1:
            print(name, step, loss.item(), indices.unique().numel())

    model.eval()
    with torch.no_grad():
        quantized, indices, _ = quantize(test)
        print(name, "error", F.mse_loss(decoder(quantized), test).item(), indices.flatten()[:6].tolist())

with torch.no_grad():
    for name in ("vq", "residual", "fsq", "lfq"):
        codes = quantizers[name](torch.randn(2, 5, 8))[1]
        print(
            name,
            "codes",
            quantizers[name].get_output_from_indices(codes).norm().item()
            if name != "fsq" and name != "lfq"
            else quantizers[name].indices_to_codes(codes).norm().item(),
        )
