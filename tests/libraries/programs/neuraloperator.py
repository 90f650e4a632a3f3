"""Trains Fourier neural operators on a family of heat equations, and evaluates them at a finer resolution."""

# /// script
# dependencies = ["neuraloperator==2.0.0"]
# ///

import torch
from neuralop import H1Loss, LpLoss
from neuralop.models import FNO, TFNO, UNO
from neuralop.utils import count_model_params

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def heat(count, size):
    """Random initial temperatures, and their solutions after some time, on a periodic square."""
    spectrum = torch.zeros(count, size, size // 2 + 1, dtype=torch.complex64)
    spectrum[:, :4, :4] = torch.randn(count, 4, 4, dtype=torch.complex64) * size**2 / 4
    k = torch.fft.fftfreq(size, 1 / size)[:, None] ** 2 + torch.fft.rfftfreq(size, 1 / size)[None] ** 2
    start = torch.fft.irfft2(spectrum, s=(size, size))
    end = torch.fft.irfft2(spectrum * torch.exp(-0.1 * k), s=(size, size))
    return start.unsqueeze(1), end.unsqueeze(1)


h1, l2 = H1Loss(d=2), LpLoss(d=2, p=2)
models = {
    "fno": FNO(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2),
    "tucker": TFNO(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2, rank=0.3),
    "uno": UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=8,
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[4, 4], [4, 4], [4, 4]],
        uno_scalings=[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]],
        n_layers=3,
        channel_mlp_skip="linear",
    ),
}
fine = heat(4, 32)
for name, model in models.items():
    print(name, "parameters", count_model_params(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=25)
    for step in range(25):
        x, y = heat(8, 16)
        loss = h1(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 6 == 0:
            print(name, step, loss.item())
    with torch.no_grad():
        print(name, "fine", l2(model(fine[0]), fine[1]).item())
