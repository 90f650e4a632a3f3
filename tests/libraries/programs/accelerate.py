"""A loop with accumulation, clipping, a schedule and gathered metrics; it saves its state and trains on."""

# /// script
# dependencies = ["accelerate==1.15.0"]
# ///

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.local_sgd import LocalSGD
from accelerate.utils import ProjectConfiguration, extract_model_from_parallel, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2),
)
x = torch.randn(320, 12, generator=torch.Generator().manual_seed(1))
y = torch.sin(x).sum(1, keepdim=True)
batches = DataLoader(TensorDataset(x[:256], y[:256]), batch_size=16, shuffle=True)
held_out = DataLoader(TensorDataset(x[256:], y[256:]), batch_size=32)
model = nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.SiLU(), nn.Dropout(0.05), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
model, optimizer, batches, held_out, schedule = accelerator.prepare(
    model, optimizer, batches, held_out, schedule
)
accelerator.register_for_checkpointing(schedule)


def epoch() -> None:
    model.train()
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    print("loss", accelerator.gather(loss.detach()).mean().item())


def evaluate() -> None:
    model.eval()
    errors = []
    for inputs, targets in held_out:
        with torch.no_grad():
            out = model(inputs)
        out, targets = accelerator.gather_for_metrics((out, targets))
        errors.append((out - targets).square())
    print("error", torch.cat(errors).mean().item())


for _ in range(6):
    epoch()
    evaluate()
accelerator.save_state()
epoch()
accelerator.load_state("project/checkpoints/checkpoint_0")
epoch()
evaluate()

with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
    for inputs, targets in batches:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        local.step()
evaluate()
accelerator.save_model(model, "saved")
load_checkpoint_in_model(extract_model_from_parallel(model), "saved")
evaluate()
