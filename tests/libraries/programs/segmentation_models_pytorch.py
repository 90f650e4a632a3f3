"""Trains U-Net, FPN and others with small encoders on shapes, with losses and metrics of segmentation."""

# /// script
# dependencies = ["segmentation-models-pytorch==0.6.0"]
# ///

import segmentation_models_pytorch as smp
import torch

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def shapes(count, size=32):
    """Images with a disc and a bar; classes are background, disc and bar."""
    grid = torch.arange(size)
    centre = torch.randint(8, 24, (count, 2, 1, 1))
    disc = (grid.view(1, 1, -1) - centre[:, 0]) ** 2 + (grid.view(1, -1, 1) - centre[:, 1]) ** 2 < 36
    bar = ((grid - torch.randint(4, 28, (count, 1))).abs() < 3).unsqueeze(1).expand(-1, size, -1)
    mask = torch.where(disc, 1, torch.where(bar, 2, 0))
    image = torch.stack([disc.float(), bar.float(), torch.rand(count, size, size)], 1)
    return image + 0.3 * torch.randn_like(image), mask


losses = {
    "Unet": smp.losses.DiceLoss("multiclass"),
    "FPN": smp.losses.FocalLoss("multiclass", gamma=2.0),
    "DeepLabV3Plus": smp.losses.LovaszLoss("multiclass"),
    "Linknet": smp.losses.TverskyLoss("multiclass", alpha=0.3, beta=0.7),
}
options = {"encoder_name": "resnet18", "encoder_weights": None, "in_channels": 3, "classes": 3}
test_images, test_masks = shapes(8)

for name, criterion in losses.items():
    model = smp.create_model(name, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=16)
    for step in range(16):
        model.train()
        images, masks = shapes(4)
        loss = criterion(model(images), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 5 == 0:
            print(name, step, loss.item())
    model.eval()
    with torch.no_grad():
        prediction = model(test_images).argmax(1)
    counts = smp.metrics.get_stats(prediction, test_masks, mode="multiclass", num_classes=3)
    print(name, "iou", smp.metrics.iou_score(*counts, reduction="macro").item())
    print(name, "f1", smp.metrics.f1_score(*counts, reduction="micro-imagewise").item())

classifier = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(32, 16, 16),
                      decoder_attention_type="scse", aux_params={"classes": 2, "dropout": 0.2})  # fmt: skip
with torch.no_grad():
    mask, label = classifier.eval()(test_images)
print("auxiliary", tuple(mask.shape), mask.mean().item(), label[0].tolist())
