"""A loop as in timm's training script: mixup, soft targets, an averaged model, layer decay, and features."""

# /// script
# dependencies = ["timm==1.0.31"]
# ///

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, accuracy, adaptive_clip_grad, random_seed

random_seed(0)
images = torch.randn(64, 3, 32, 32)
labels = torch.arange(64) % 4
for label in range(4):
    images[labels == label, :, 8 * label : 8 * label + 8] += 0.7


def train(name: str, steps: int, optimizer: str, **options) -> torch.nn.Module:
    model = timm.create_model(name, num_classes=4, **options)
    average = ModelEmaV3(model, decay=0.9)
    updates = create_optimizer_v2(model, opt=optimizer, lr=2e-3, weight_decay=0.02, layer_decay=0.9)
    schedule = CosineLRScheduler(updates, t_initial=steps, warmup_t=5, warmup_lr_init=1e-4)
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=4)
    criterion = SoftTargetCrossEntropy()
    model.train()
    for step in range(steps):
        chosen = torch.randperm(64)[:16]
        x, y = mixup(images[chosen], labels[chosen])
        loss = criterion(model(x), y)
        updates.zero_grad()
        loss.backward()
        adaptive_clip_grad(model.parameters(), 0.1)
        updates.step()
        average.update(model, step)
        schedule.step(step + 1)
        if step % 10 == 0:
            print(name, loss.item())
    model.eval(), average.module.eval()
    with torch.no_grad():
        for kind, net in (("last", model), ("averaged", average.module)):
            print(name, kind, *(share.item() for share in accuracy(net(images), labels, topk=(1, 2))))
    return model


train(
    "vit_tiny_patch16_224",
    40,
    "lamb",
    img_size=32,
    patch_size=8,
    embed_dim=48,
    depth=3,
    num_heads=3,
    drop_path_rate=0.1,
)
net = train("resnet10t", 40, "adamw", drop_rate=0.1)
with torch.no_grad():
    print("pooled", net.forward_head(net.forward_features(images[:8]), pre_logits=True).mean().item())
pyramid = timm.create_model("mobilenetv3_small_050", features_only=True, out_indices=(1, 2, 3))
with torch.no_grad():
    for level in pyramid.eval()(images[:8]):
        print("level", *level.shape, level.abs().mean().item())
