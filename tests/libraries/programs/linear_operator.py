"""Fits a Gaussian process by linear operators; solves and log determinants that exploit structure."""

# /// script
# dependencies = ["linear-operator==0.6.1"]
# ///

import torch
from linear_operator import settings, to_linear_operator
from linear_operator.operators import (
    BlockDiagLinearOperator,
    DiagLinearOperator,
    IdentityLinearOperator,
    KroneckerProductLinearOperator,
    LowRankRootLinearOperator,
    RootLinearOperator,
    ToeplitzLinearOperator,
    TriangularLinearOperator,
)

torch.manual_seed(0)

x = torch.linspace(0, 1, 40)
y = (8 * x).sin() + 0.1 * torch.randn(40)
log_length, log_scale, log_noise = (torch.tensor(v, requires_grad=True) for v in (-1.0, 0.0, -2.0))


def kernel(a, b):
    return log_scale.exp() * torch.exp(-((a[:, None] - b[None]) ** 2) / (2 * log_length.exp() ** 2))


optimizer = torch.optim.Adam([log_length, log_scale, log_noise], lr=0.05)
for step in range(60):
    covariance = to_linear_operator(kernel(x, x)).add_diagonal(log_noise.exp())
    quadratic, determinant = covariance.inv_quad_logdet(inv_quad_rhs=y[:, None], logdet=True)
    loss = 0.5 * (quadratic + determinant) / len(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print("likelihood", step, loss.item(), log_length.item(), log_noise.item())

with torch.no_grad():
    query = torch.linspace(0, 1, 7)
    covariance = to_linear_operator(kernel(x, x)).add_diagonal(log_noise.exp())
    print("prediction", (kernel(query, x) @ covariance.solve(y[:, None]))[:, 0].tolist())
    with settings.max_cholesky_size(1), settings.cg_tolerance(1e-5), settings.max_preconditioner_size(5):
        print("by conjugate gradients", (kernel(query, x) @ covariance.solve(y[:, None]))[:, 0].tolist())

column = torch.exp(-torch.arange(12.0) / 3)
a, b = (torch.randn(n, n) for n in (3, 4))
spd = [m @ m.T + torch.eye(len(m)) for m in (a, b)]
operators = {
    "toeplitz": ToeplitzLinearOperator(column).add_jitter(0.1),
    "kronecker": KroneckerProductLinearOperator(*map(to_linear_operator, spd)).add_diagonal(
        torch.tensor(0.5)
    ),
    "low rank": LowRankRootLinearOperator(torch.randn(12, 2)).add_diagonal(torch.rand(12) + 0.5),
    "blocks": BlockDiagLinearOperator(to_linear_operator(torch.stack([spd[1]] * 3))),
    "root": RootLinearOperator(torch.randn(12, 12)) + DiagLinearOperator(torch.rand(12) + 1),
    "sum": to_linear_operator(spd[1]).repeat(3, 1, 1).sum(-3) * 0.5 + IdentityLinearOperator(4),
}
for name, operator in operators.items():
    size = operator.shape[-1]
    rhs = torch.randn(size, 2)
    quadratic, determinant = operator.inv_quad_logdet(inv_quad_rhs=rhs, logdet=True)
    print(name, type(operator).__name__, quadratic.item(), determinant.item())
    print(
        name,
        operator.matmul(rhs).norm().item(),
        operator.solve(rhs).norm().item(),
        operator.diagonal().sum().item(),
    )
    root = operator.root_decomposition().to_dense()
    print(name, "root", torch.allclose(root @ root.mT, operator.to_dense(), atol=1e-3))

factor = TriangularLinearOperator(torch.linalg.cholesky(spd[0]))
print("triangular", factor.solve(torch.ones(3)).tolist(), factor.logdet().item())
samples = operators["root"].zero_mean_mvn_samples(3)
print("samples", samples.shape[0], samples.norm().item())
