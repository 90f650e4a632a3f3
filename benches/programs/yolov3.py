"""A compact YOLOv3 learns to find coloured shapes, at three scales with three anchors each.

Boxes are assigned to anchors by data-dependent indexing, by a loop over boxes and by masks, so sizes depend
on the batch. Each scale stores its cell coordinates and its metrics on the module.
"""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 20
COMPARABLE = 2

SIZE, CLASSES = 96, 3
ANCHORS = (
    (32, ((34, 34), (48, 30), (30, 48))),
    (16, ((20, 20), (28, 18), (18, 28))),
    (8, ((8, 8), (14, 10), (10, 14))),
)
"""The stride of each scale, with the widths and heights of its anchors, in pixels."""


class Shapes(Dataset):
    """Noise with one to four bright rectangles. A rectangle's class is the channel in which it is bright."""

    def __init__(self, count: int) -> None:
        self.images = 0.3 * torch.rand(count, 3, SIZE, SIZE)
        self.targets = []
        for image in self.images:
            boxes = []
            for _ in range(random.randint(1, 4)):
                label, width, height = random.randrange(CLASSES), random.randint(8, 48), random.randint(8, 48)
                left, top = random.randint(0, SIZE - width - 1), random.randint(0, SIZE - height - 1)
                image[label, top : top + height, left : left + width] += 0.7
                boxes.append((0, label, left + width / 2, top + height / 2, width, height))
            self.targets.append(torch.tensor(boxes) / torch.tensor([1, 1, SIZE, SIZE, SIZE, SIZE]))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.targets[index].clone()


def collate(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the images, and set the first element of each box to the number of its image."""
    images, targets = zip(*batch, strict=True)
    for number, boxes in enumerate(targets):
        boxes[:, 0] = number
    return torch.stack(images), torch.cat(targets)


class Conv(nn.Sequential):
    """Convolution, norm, leaky ReLU."""

    def __init__(self, width_in: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.1, inplace=True),
        )


class Residual(nn.Module):
    """Darknet's residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Conv(width, width // 2, 1), Conv(width // 2, width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def wh_iou(wh: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the overlaps (IoU) of all pairs from two lists of boxes, as if the boxes had the same centre."""
    intersection = torch.min(wh[:, None], others[None]).prod(2)
    return intersection / (wh.prod(1)[:, None] + others.prod(1)[None] - intersection)


def box_iou(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the pairwise overlaps (IoU) of two equally long lists of boxes (centre, width, height)."""
    low = torch.max(boxes[:, :2] - boxes[:, 2:] / 2, others[:, :2] - others[:, 2:] / 2)
    high = torch.min(boxes[:, :2] + boxes[:, 2:] / 2, others[:, :2] + others[:, 2:] / 2)
    intersection = (high - low).clamp(min=0).prod(1)
    return intersection / (boxes[:, 2:].prod(1) + others[:, 2:].prod(1) - intersection)


class YOLOLayer(nn.Module):
    """Loss and metrics of one scale."""

    def __init__(self, stride: int, anchors: tuple[tuple[int, int], ...], ignore: float = 0.5) -> None:
        super().__init__()
        self.ignore = ignore
        self.register_buffer("anchors", torch.tensor(anchors) / stride)
        self.grid_size = 0
        self.metrics: dict[str, float] = {}

    def compute_grid(self, size: int, device: torch.device) -> None:
        """Compute the coordinates of the cells' corners."""
        self.grid_size = size
        rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        self.grid = torch.stack((columns, rows), dim=-1).to(device)

    def build_targets(self, predicted: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Assign each box to the best anchor of its cell, and measure the prediction's accuracy."""
        shape, device = predicted.shape[:-1], targets.device
        obj = torch.zeros(shape, dtype=torch.bool, device=device)
        noobj = torch.ones(shape, dtype=torch.bool, device=device)
        offsets = torch.zeros(*shape, 4, device=device)
        classes = torch.zeros(*shape, CLASSES, device=device)

        image, label = targets[:, :2].long().t()
        boxes = targets[:, 2:6] * self.grid_size
        ious = wh_iou(boxes[:, 2:], self.anchors)
        best = ious.argmax(1)
        column, row = boxes[:, :2].long().t()

        obj[image, best, row, column] = True
        noobj[image, best, row, column] = False
        for number, overlaps in enumerate(ious):
            noobj[image[number], overlaps > self.ignore, row[number], column[number]] = False
        offsets[image, best, row, column, :2] = boxes[:, :2] - boxes[:, :2].floor()
        offsets[image, best, row, column, 2:] = torch.log(boxes[:, 2:] / self.anchors[best])
        classes[image, best, row, column, label] = 1

        iou = box_iou(predicted[image, best, row, column], boxes)
        self.metrics = {"iou": iou.mean().item(), "recall50": (iou > 0.5).float().mean().item()}
        return {"obj": obj, "noobj": noobj, "offsets": offsets, "classes": classes}

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        batch, _, size, _ = features.shape
        if size != self.grid_size:
            self.compute_grid(size, features.device)
        prediction = features.view(batch, len(self.anchors), 5 + CLASSES, size, size).permute(0, 1, 3, 4, 2)
        xy, wh = prediction[..., :2].sigmoid(), prediction[..., 2:4]
        confidence, classes = prediction[..., 4].sigmoid(), prediction[..., 5:].sigmoid()
        boxes = torch.cat((xy + self.grid, wh.exp() * self.anchors[:, None, None]), dim=-1)

        target = self.build_targets(boxes.detach(), targets)
        obj, noobj = target["obj"], target["noobj"]
        loss_xy = F.mse_loss(xy[obj], target["offsets"][obj][:, :2])
        loss_wh = F.mse_loss(wh[obj], target["offsets"][obj][:, 2:])
        loss_obj = F.binary_cross_entropy(confidence[obj], obj[obj].float())
        loss_noobj = F.binary_cross_entropy(confidence[noobj], obj[noobj].float())
        loss_classes = F.binary_cross_entropy(classes[obj], target["classes"][obj])
        return 2 * loss_xy + 2 * loss_wh + loss_obj + 10 * loss_noobj + loss_classes


class YOLOv3(nn.Module):
    """A darknet of five stages. Each of the last three stages has a head. The heads are ordered from coarse
    to fine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Conv(3, 16, 3), Conv(16, 32, 3, 2), Residual(32), Conv(32, 64, 3, 2), Residual(64)
        )
        self.stages = nn.ModuleList(
            [
                nn.Sequential(Conv(64, 96, 3, 2), Residual(96), Residual(96)),
                nn.Sequential(Conv(96, 128, 3, 2), Residual(128), Residual(128)),
                nn.Sequential(Conv(128, 192, 3, 2), Residual(192)),
            ]
        )
        self.necks = nn.ModuleList(
            [
                nn.Sequential(Conv(192, 96, 1), Conv(96, 192, 3), Conv(192, 96, 1)),
                nn.Sequential(Conv(64 + 128, 64, 1), Conv(64, 128, 3), Conv(128, 64, 1)),
                nn.Sequential(Conv(32 + 96, 48, 1), Conv(48, 96, 3), Conv(96, 48, 1)),
            ]
        )
        outputs = 3 * (5 + CLASSES)
        self.heads = nn.ModuleList(
            nn.Sequential(Conv(width, 2 * width, 3), nn.Conv2d(2 * width, outputs, 1))
            for width in (96, 64, 48)
        )
        self.laterals = nn.ModuleList([Conv(96, 64, 1), Conv(64, 32, 1)])
        self.scales = nn.ModuleList(YOLOLayer(*scale) for scale in ANCHORS)

    def features(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the raw predictions of every scale."""
        x = self.stem(x)
        stages = []
        for stage in self.stages:
            x = stage(x)
            stages.append(x)
        outputs = []
        x = stages.pop()
        for number, (neck, head) in enumerate(zip(self.necks, self.heads, strict=True)):
            if number > 0:
                x = F.interpolate(self.laterals[number - 1](x), scale_factor=2, mode="nearest")
                x = torch.cat((x, stages.pop()), dim=1)
            x = neck(x)
            outputs.append(head(x))
        return outputs

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = self.features(images)
        return sum(scale(output, targets) for scale, output in zip(self.scales, outputs, strict=True))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(Shapes(64), batch_size=4, shuffle=True, collate_fn=collate))
    model = YOLOv3().to(device)
    net = compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
    history: list[list[float]] = []

    def step() -> float:
        images, targets = next(batches)
        images, targets = images.to(device), targets.to(device)
        loss = net(images, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append([scale.metrics["iou"] for scale in model.scales])
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
