"""A classifier and a regressor trained beside collections of metrics, trackers and running means."""

# /// script
# dependencies = ["torchmetrics==1.9.0"]
# ///

import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, MetricTracker, R2Score, SpearmanCorrCoef
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.functional import pairwise_cosine_similarity
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, PearsonCorrCoef

torch.manual_seed(0)
x = torch.randn(256, 12)
labels = (x[:, :5] + 0.5 * torch.randn(256, 5)).argmax(-1)
values = torch.tanh(x @ torch.randn(12, 1))

classifier = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
quality = MetricCollection(
    [
        MulticlassAccuracy(5, average="micro"),
        MulticlassF1Score(5),
        MulticlassAUROC(5),
        MulticlassCalibrationError(5),
    ]
)
tracker, confusion, mean = MetricTracker(quality), MulticlassConfusionMatrix(5), MeanMetric()
optimizer = torch.optim.SGD(classifier.parameters(), lr=0.2, momentum=0.9)
for _ in range(5):
    tracker.increment()
    for chosen in torch.randperm(256).split(32):
        logits = classifier(x[chosen])
        loss = nn.functional.cross_entropy(logits, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probabilities = logits.detach().softmax(-1)
        tracker.update(probabilities, labels[chosen])
        confusion.update(probabilities, labels[chosen])
        mean.update(loss.detach(), weight=len(chosen))
    print("loss", mean.compute().item())
    for name, value in tracker.compute().items():
        print(name, value.item())
    mean.reset()
best, when = tracker.best_metric(return_step=True)
print("best", best["MulticlassAccuracy"], when["MulticlassAccuracy"])
print("confusion", *confusion.compute().flatten().tolist())

regressor = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
errors = MetricCollection(
    MeanSquaredError(), MeanAbsoluteError(), PearsonCorrCoef(), SpearmanCorrCoef(), R2Score()
)
optimizer = torch.optim.Adam(regressor.parameters(), lr=0.01)
for _ in range(5):
    for chosen in torch.randperm(256).split(32):
        out, wanted = regressor(x[chosen]), values[chosen].flatten()
        optimizer.zero_grad()
        nn.functional.mse_loss(out, wanted).backward()
        optimizer.step()
        errors.update(out.detach(), wanted)
    print("errors", *(value.item() for value in errors.compute().values()))
    errors.reset()

clean = torch.rand(4, 3, 32, 32)
noisy = (clean + 0.1 * torch.randn_like(clean)).clamp(0, 1)
for metric in (PeakSignalNoiseRatio(data_range=1.0), StructuralSimilarityIndexMeasure(data_range=1.0)):
    print(type(metric).__name__, metric(noisy, clean).item())
print("cosine", pairwise_cosine_similarity(x[:8]).mean().item())
