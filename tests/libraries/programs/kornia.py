"""Trains with differentiable augmentations, registers images, and filters, recolors and measures them."""

# /// script
# dependencies = ["kornia==0.9.0"]
# ///

import kornia
import kornia.augmentation as K
import torch
from kornia.geometry import transform as T
from torch import nn
from torch.nn import functional as F

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def scenes(count, size=32):
    grid = torch.linspace(-1, 1, size)
    centre = torch.rand(count, 3, 2, 1, 1) - 0.5
    distance = (grid.view(1, 1, 1, -1) - centre[:, :, 0]) ** 2 + (
        grid.view(1, 1, -1, 1) - centre[:, :, 1]
    ) ** 2
    return torch.exp(-distance / 0.08).clamp(0, 1)


augment = K.AugmentationSequential(
    K.RandomHorizontalFlip(p=0.5),
    K.RandomAffine(20.0, translate=(0.1, 0.1), scale=(0.8, 1.2), p=0.8),
    K.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=0.8),
    K.RandomGaussianBlur((3, 3), (0.1, 1.0), p=0.3),
    K.RandomErasing(p=0.3),
    data_keys=["input", "mask"],
)
segmenter = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 2, 3, padding=1))
optimizer = torch.optim.Adam(segmenter.parameters(), lr=1e-2)
for step in range(30):
    images = scenes(6)
    images, masks = augment(images, (images[:, :1] > 0.5).float())
    logits, target = segmenter(images), (masks[:, 0] > 0.5).long()
    loss = kornia.losses.focal_loss(logits, target, alpha=0.5, gamma=2.0, reduction="mean")
    loss = loss + kornia.losses.dice_loss(logits, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        print("segmentation", step, loss.item())

# Registration by gradient descent on a homography.
fixed = scenes(1)
moving = T.warp_affine(fixed, torch.tensor([[[0.98, 0.1, 1.5], [-0.1, 0.98, 1.0]]]), (32, 32))
parameters = torch.zeros(1, 2, 3, requires_grad=True)
optimizer = torch.optim.Adam([parameters], lr=0.02)
identity = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
for step in range(30):
    warped = T.warp_affine(fixed, identity + parameters * torch.tensor([1.0, 1.0, 20.0]), (32, 32))
    loss = F.l1_loss(warped, moving) + 0.1 * kornia.losses.ssim_loss(warped, moving, 5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        print("registration", step, loss.item())

with torch.no_grad():
    images = scenes(2)
    for name, result in {
        "lab": kornia.color.rgb_to_lab(images),
        "hsv": kornia.color.rgb_to_hsv(images),
        "canny": kornia.filters.canny(images)[1],
        "sobel": kornia.filters.sobel(images),
        "median": kornia.filters.median_blur(images, (3, 3)),
        "bilateral": kornia.filters.bilateral_blur(images, (3, 3), 0.1, (1.0, 1.0)),
        "opening": kornia.morphology.opening(images, torch.ones(3, 3)),
        "harris": kornia.feature.harris_response(images[:, :1]),
        "equalized": kornia.enhance.equalize_clahe(images),
        "pyramid": T.pyrdown(images),
        "rotated": T.rotate(images, torch.tensor([30.0, 60.0])),
        "gamma": kornia.enhance.adjust_gamma(images, 0.7),
    }.items():
        print(name, tuple(result.shape), result.mean().item())

    detector = kornia.feature.ScaleSpaceDetector(10, mr_size=3.0)
    frames, responses = detector(scenes(1)[:, :1])
    print("keypoints", tuple(frames.shape), responses.mean().item())
    points = torch.rand(1, 8, 2)
    homography = torch.tensor([[[1.1, 0.1, 0.2], [0.0, 0.9, -0.1], [0.01, 0.02, 1.0]]])
    moved = kornia.geometry.transform_points(homography, points)
    estimate = kornia.geometry.find_homography_dlt(points, moved)
    print("homography", torch.allclose(estimate, homography, atol=1e-2))
    axis_angle = torch.rand(3, 3)
    rotation = kornia.geometry.axis_angle_to_rotation_matrix(axis_angle)
    print(
        "rotation",
        rotation.sum().item(),
        kornia.geometry.rotation_matrix_to_axis_angle(rotation).sum().item(),
    )
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 3.0, 3.0]])
    print("iou", kornia.metrics.mean_iou_bbox(boxes, boxes).tolist())
