"""Trains a small Mamba language model with the parallel scan, and continues a text token by token."""

# /// script
# dependencies = ["mambapy==1.2.0"]
# ///

import torch
from mambapy.mamba import Mamba, MambaConfig, RMSNorm
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
VOCABULARY = 12


def sequences(count, length=24):
    """Periodic sequences, each with a period of its own."""
    period = torch.randint(2, 6, (count, 1))
    pattern = torch.randint(0, VOCABULARY, (count, 6))
    return pattern.gather(1, torch.arange(length).expand(count, -1) % period)


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.d_model)
        self.mamba = Mamba(config)
        self.head = nn.Sequential(RMSNorm(config.d_model), nn.Linear(config.d_model, VOCABULARY))

    def forward(self, tokens):
        return self.head(self.mamba(self.embedding(tokens)))

    def step(self, token, caches):
        hidden, caches = self.mamba.step(self.embedding(token), caches)
        return self.head(hidden), caches


model = LanguageModel(MambaConfig(d_model=32, n_layers=2, d_state=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(60):
    tokens = sequences(16)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 4:
        print("step", step, loss.item())

model.eval()
with torch.no_grad():
    tokens = sequences(4, 30)
    parallel = model(tokens)
    caches = [(None, torch.zeros(4, 64, 3)) for _ in range(2)]
    outputs = []
    for token in tokens.unbind(1):
        logits, caches = model.step(token, caches)
        outputs.append(logits)
    sequential = torch.stack(outputs, 1)
    print("parallel and sequential agree", torch.allclose(parallel, sequential, atol=1e-4))
    print("next tokens", sequential.argmax(-1)[:, -5:].tolist())
    print("loss", F.cross_entropy(sequential[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item())
