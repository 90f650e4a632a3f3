"""torchvision's Faster R-CNN with a small backbone learns to find coloured shapes.

In the middle of the forward pass, the region proposals are converted to NumPy arrays, filtered by a
non-maximum suppression in NumPy, and moved back to the device.
"""

import random
from collections.abc import Callable

import numpy as np
import torch
from _main import Step, endless, main
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign

STEPS = 20
COMPARABLE = 5

SIZE, CLASSES = 96, 4


class Shapes(Dataset):
    """Noise with one to four bright rectangles. A rectangle's class is the channel in which it is bright."""

    def __init__(self, count: int) -> None:
        self.images = 0.3 * torch.rand(count, 3, SIZE, SIZE)
        self.targets = []
        for image in self.images:
            boxes, labels = [], []
            for _ in range(random.randint(1, 4)):
                label, width, height = random.randrange(3), random.randint(12, 48), random.randint(12, 48)
                left, top = random.randint(0, SIZE - width), random.randint(0, SIZE - height)
                image[label, top : top + height, left : left + width] += 0.7
                boxes.append([left, top, left + width, top + height])
                labels.append(label + 1)
            self.targets.append(
                {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.images[index], self.targets[index]


def collate(batch: list) -> tuple[tuple, tuple]:
    """The images, and the targets."""
    images, targets = zip(*batch, strict=True)
    return images, targets


class Backbone(nn.Sequential):
    """Three convolutions, which return features with stride 8."""

    def __init__(self, width: int = 64) -> None:
        def stage(width_in: int, width: int) -> list[nn.Module]:
            conv = nn.Conv2d(width_in, width, 3, 2, 1, bias=False)
            return [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]

        super().__init__(*stage(3, 16), *stage(16, 32), *stage(32, width))
        self.out_channels = width


def nms(boxes: np.ndarray, threshold: float, most: int) -> np.ndarray:
    """Non-maximum suppression: return the indices of the boxes to keep. Boxes are sorted by score."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left = np.arange(len(boxes))
    kept = []
    while len(left) and len(kept) < most:
        best, left = left[0], left[1:]
        kept.append(best)
        low = np.maximum(boxes[best, :2], boxes[left, :2])
        high = np.minimum(boxes[best, 2:], boxes[left, 2:])
        intersection = np.clip(high - low, 0, None).prod(axis=1)
        left = left[intersection / (areas[best] + areas[left] - intersection) <= threshold]
    return np.array(kept, dtype=np.int64)


class NumpyRPN(RegionProposalNetwork):
    """A region proposal network that chooses among its proposals in NumPy."""

    def filter_proposals(self, proposals, objectness, image_shapes, num_anchors_per_level):
        proposals = proposals.detach().cpu().numpy()
        objectness = objectness.detach().reshape(len(proposals), -1).cpu().numpy()
        final_boxes, final_scores = [], []
        for boxes, scores, (height, width) in zip(proposals, objectness, image_shapes, strict=True):
            order = np.argsort(-scores, kind="stable")[: self.pre_nms_top_n()]
            boxes, scores = boxes[order].copy(), scores[order]
            boxes[:, 0::2] = boxes[:, 0::2].clip(0, width)
            boxes[:, 1::2] = boxes[:, 1::2].clip(0, height)
            large = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(axis=1)
            boxes, scores = boxes[large], scores[large]
            keep = nms(boxes, self.nms_thresh, self.post_nms_top_n())
            final_boxes.append(torch.from_numpy(boxes[keep]).to(self.device))
            final_scores.append(torch.from_numpy(1 / (1 + np.exp(-scores[keep]))).to(self.device))
        return final_boxes, final_scores

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def detector() -> FasterRCNN:
    """The model, with about a tenth of the usual sizes."""
    backbone = Backbone()
    anchors = AnchorGenerator(sizes=((12, 24, 40),), aspect_ratios=((0.5, 1.0, 2.0),))
    model = FasterRCNN(
        backbone,
        min_size=SIZE,
        max_size=SIZE,
        image_mean=[0.3, 0.3, 0.3],
        image_std=[0.3, 0.3, 0.3],
        rpn_anchor_generator=anchors,
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=5, sampling_ratio=2),
        box_head=TwoMLPHead(backbone.out_channels * 5 * 5, 128),
        box_predictor=FastRCNNPredictor(128, CLASSES),
        box_batch_size_per_image=64,
    )
    model.rpn = NumpyRPN(
        anchors,
        RPNHead(backbone.out_channels, anchors.num_anchors_per_location()[0]),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=64,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 200, "testing": 100},
        post_nms_top_n={"training": 50, "testing": 25},
        nms_thresh=0.7,
    )
    return model


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(Shapes(64), batch_size=2, shuffle=True, collate_fn=collate))
    model = detector().to(device)
    model.train()
    net = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    log: dict[str, float] = {}

    def step() -> float:
        images, targets = next(batches)
        images = [image.to(device) for image in images]
        targets = [{key: value.to(device) for key, value in target.items()} for target in targets]
        losses = net(images, targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.update((name, value.item()) for name, value in losses.items())
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
