"""Trains an equivariant network of tensor products on point clouds, and rotates its inputs and outputs."""

# /// script
# dependencies = ["e3nn==0.6.0"]
# ///

import torch
from e3nn import io, nn, o3
from e3nn.math import soft_one_hot_linspace

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Convolution(torch.nn.Module):
    def __init__(self, irreps_in, irreps_out):
        super().__init__()
        self.irreps_sh = o3.Irreps.spherical_harmonics(lmax=2)
        self.product = o3.FullyConnectedTensorProduct(
            irreps_in, self.irreps_sh, irreps_out, shared_weights=False
        )
        self.weights = nn.FullyConnectedNet([6, 16, self.product.weight_numel], torch.nn.functional.silu)
        self.skip = o3.Linear(irreps_in, irreps_out)

    def forward(self, features, positions):
        vectors = positions.unsqueeze(-2) - positions.unsqueeze(-3)
        harmonics = o3.spherical_harmonics(self.irreps_sh, vectors, normalize=True, normalization="component")
        lengths = soft_one_hot_linspace(vectors.norm(dim=-1), 0.0, 3.0, 6, basis="smooth_finite", cutoff=True)
        sources = features.unsqueeze(-3).expand(*vectors.shape[:-1], -1)
        messages = self.product(sources, harmonics, self.weights(lengths * 6**0.5))
        return self.skip(features) + messages.mean(-2)


class Network(torch.nn.Module):
    """Features of points are scalars; the output is a vector for each cloud and its energy."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Gate("8x0e", [torch.tanh], "8x0e", [torch.sigmoid], "4x1o + 4x2e")
        self.first = Convolution("2x0e", self.gate.irreps_in)
        self.norm = nn.BatchNorm(self.gate.irreps_out)
        self.second = Convolution(self.gate.irreps_out, "1x0e + 1x1o")

    def forward(self, features, positions):
        hidden = self.gate(self.first(features, positions))
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return self.second(hidden, positions).mean(-2)


def clouds(count):
    positions, features = torch.randn(count, 6, 3), torch.rand(count, 6, 2)
    dipole = (features[..., :1] * (positions - positions.mean(1, keepdim=True))).mean(1)
    return features, positions, torch.cat([torch.pdist(positions[0]).mean().expand(count, 1), dipole], -1)


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    features, positions, target = clouds(8)
    loss = (model(features, positions) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        print("step", step, loss.item())

model.eval()
rotation = o3.rand_matrix()
features, positions, _ = clouds(4)
with torch.no_grad():
    output = model(features, positions)
    rotated = model(features, positions @ rotation.T)
    matrix = o3.Irreps("1x0e + 1x1o").D_from_matrix(rotation)
    print("equivariant", torch.allclose(rotated, output @ matrix.T, atol=1e-4))
    print("output", output[0].tolist())

tensor = io.CartesianTensor("ij=ji")
print(tensor, tensor.from_cartesian(positions[0, :3] @ positions[0, :3].T).tolist())
grid = o3.ToS2Grid(lmax=3, res=(8, 9))
signal = torch.randn(2, 16)
print(
    "sphere",
    grid(signal).mean().item(),
    o3.FromS2Grid((8, 9), 3)(grid(signal)).sub(signal).abs().max().item() < 1e-4,
)
print(
    "wigner", o3.wigner_3j(1, 1, 2).norm().item(), o3.wigner_D(2, *o3.matrix_to_angles(rotation)).sum().item()
)
