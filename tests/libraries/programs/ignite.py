"""Engines with metrics, a schedule, early stopping, checkpoints and an average of the model's weights."""

# /// script
# dependencies = ["pytorch-ignite==0.5.5"]
# ///

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    LinearCyclicalScheduler,
    TerminateOnNan,
    create_lr_scheduler_with_warmup,
)
from ignite.metrics import Accuracy, ConfusionMatrix, Fbeta, Loss, RunningAverage
from ignite.utils import manual_seed
from torch import nn

manual_seed(0)
device = idist.device()
x = torch.randn(384, 10)
y = (x[:, :3] + 0.3 * torch.randn(384, 3)).argmax(-1)
parts = torch.utils.data.random_split(torch.utils.data.TensorDataset(x, y), [256, 128])
batches = idist.auto_dataloader(parts[0], batch_size=16, shuffle=True)
held_out = idist.auto_dataloader(parts[1], batch_size=64)

model = idist.auto_model(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3)))
optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.02))
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

trainer = create_supervised_trainer(model, optimizer, criterion, device, gradient_accumulation_steps=1)
RunningAverage(output_transform=lambda loss: loss).attach(trainer, "average")
trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
cycle = LinearCyclicalScheduler(optimizer, "lr", 0.02, 0.001, cycle_size=40)
schedule = create_lr_scheduler_with_warmup(cycle, warmup_start_value=0.0, warmup_duration=10)
trainer.add_event_handler(Events.ITERATION_STARTED, schedule)
average = EMAHandler(model, momentum=0.02)
average.attach(trainer)

confusion = ConfusionMatrix(3, device=device)
metrics = {
    "accuracy": Accuracy(device=device),
    "loss": Loss(criterion, device=device),
    "f1": Fbeta(1.0, device=device),
    "confusion": confusion,
}
evaluator = create_supervised_evaluator(model, metrics, device)
stopping = EarlyStopping(4, lambda engine: -engine.state.metrics["loss"], trainer)
evaluator.add_event_handler(Events.COMPLETED, stopping)
best = Checkpoint(
    {"model": model},
    DiskSaver("checkpoints", create_dir=True, require_empty=False),
    n_saved=1,
    score_function=lambda engine: engine.state.metrics["accuracy"],
)
evaluator.add_event_handler(Events.COMPLETED, best)


@trainer.on(Events.ITERATION_COMPLETED(every=16))
def tell_average(engine):
    print("average", engine.state.metrics["average"])


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(held_out)
    found = evaluator.state.metrics
    print("epoch", engine.state.epoch, *(float(found[name]) for name in ("loss", "accuracy", "f1")))


trainer.run(batches, max_epochs=6)
print("confusion", *evaluator.state.metrics["confusion"].flatten().tolist())
averaged = create_supervised_evaluator(average.ema_model, {"loss": Loss(criterion, device=device)}, device)
print("averaged", averaged.run(held_out).metrics["loss"])
