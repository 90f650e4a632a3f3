"""Trains a 3D U-Net on synthetic volumes, with transforms, sliding windows, metrics and post-processing."""

# /// script
# dependencies = ["monai==1.6.1", "scikit-image==0.26.0"]
# ///

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, create_test_image_3d, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss, TverskyLoss
from monai.metrics import DiceMetric, HausdorffDistanceMetric
from monai.networks.nets import UNet
from monai.transforms import (
    Activations,
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    KeepLargestConnectedComponent,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism

set_determinism(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def volumes(count, seed):
    random = np.random.RandomState(seed)
    for _ in range(count):
        image, label = create_test_image_3d(
            32, 32, 32, num_objs=4, rad_max=8, rad_min=5, num_seg_classes=1, random_state=random
        )
        yield {"image": image, "label": label}


keys = ["image", "label"]
prepare = [EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd("image")]
augment = [
    RandCropByPosNegLabeld(keys, label_key="label", spatial_size=(16, 16, 16), pos=1, neg=1, num_samples=2),
    RandRotate90d(keys, prob=0.5, spatial_axes=(0, 2)),
    RandFlipd(keys, prob=0.5, spatial_axis=1),
    RandGaussianNoised("image", prob=0.5, std=0.05),
]
training = CacheDataset(list(volumes(6, 0)), Compose(prepare + augment), progress=False)
validation = CacheDataset(list(volumes(2, 1)), Compose(prepare), progress=False)
loader = DataLoader(training, batch_size=2, shuffle=True)

model = UNet(3, 1, 1, channels=(8, 16), strides=(2,), num_res_units=1, norm="batch").to(device)
criterion = DiceCELoss(sigmoid=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(8):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        loss = criterion(model(batch["image"].to(device)), batch["label"].to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    print("epoch", epoch, total / len(loader))

post = Compose(
    [Activations(sigmoid=True), AsDiscrete(threshold=0.5), KeepLargestConnectedComponent(connectivity=1)]
)
dice, hausdorff = DiceMetric(include_background=True), HausdorffDistanceMetric(percentile=95)
model.eval()
with torch.no_grad():
    for batch in DataLoader(validation, batch_size=1):
        label = batch["label"].to(device)
        logits = sliding_window_inference(
            batch["image"].to(device), (16, 16, 16), 4, model, overlap=0.25, mode="gaussian"
        )
        predictions = [post(x) for x in decollate_batch(logits)]
        dice(predictions, decollate_batch(label))
        hausdorff(predictions, decollate_batch(label))
        print("tversky", TverskyLoss(sigmoid=True)(logits, label).item())
print("dice", dice.aggregate().item(), "hausdorff", hausdorff.aggregate().item())
