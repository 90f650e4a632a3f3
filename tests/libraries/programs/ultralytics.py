"""Trains a small YOLO to detect rectangles with the library's trainer, validates it and predicts."""

# /// script
# dependencies = ["ultralytics-opencv-headless==8.4.190"]
# ///

import os
import tempfile
from pathlib import Path

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp())
os.environ.setdefault("YOLO_OFFLINE", "True")
os.environ.setdefault("YOLO_VERBOSE", "False")

import cv2
import numpy as np
import yaml
from ultralytics import YOLO

ARCHITECTURE = {
    "nc": 2,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "C2f", [16, True]],
        [-1, 1, "Conv", [32, 3, 2]],
        [-1, 1, "C2f", [32, True]],
        [-1, 1, "Conv", [32, 3, 2]],
        [-1, 1, "SPPF", [32, 5]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
        [[-1, 4], 1, "Concat", [1]],
        [-1, 1, "C2f", [32]],
        [[9, 6], 1, "Detect", ["nc"]],
    ],
}


def rectangles(folder, count, rng):
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    for i in range(count):
        picture, lines = rng.integers(0, 60, (64, 64, 3), dtype=np.uint8), []
        for _ in range(2):
            kind, (w, h) = int(rng.integers(2)), rng.integers(12, 24, 2)
            x, y = rng.integers(0, 64 - w), rng.integers(0, 64 - h)
            picture[y : y + h, x : x + w] = (255, 255, 0) if kind else (0, 128, 255)
            lines.append(f"{kind} {(x + w / 2) / 64} {(y + h / 2) / 64} {w / 64} {h / 64}")
        cv2.imwrite(str(folder / "images" / f"{i}.png"), picture)
        (folder / "labels" / f"{i}.txt").write_text("\n".join(lines))


with tempfile.TemporaryDirectory() as name:
    root, rng = Path(name), np.random.default_rng(0)
    rectangles(root / "train", 32, rng)
    rectangles(root / "val", 8, rng)
    (root / "tiny.yaml").write_text(yaml.dump(ARCHITECTURE))
    data = {"path": str(root), "train": "train/images", "val": "val/images", "names": ["blue", "yellow"]}
    (root / "data.yaml").write_text(yaml.dump(data))

    model = YOLO(root / "tiny.yaml", verbose=False)
    history = []
    model.add_callback(
        "on_train_epoch_end", lambda trainer: history.append([float(v) for v in trainer.tloss.values()])
    )
    model.train(
        data=str(root / "data.yaml"), epochs=6, imgsz=64, batch=8, workers=0, seed=0, plots=False, save=False,
        amp=False, optimizer="AdamW", lr0=0.002, warmup_epochs=1, project=name, verbose=False, mosaic=0.5,
        close_mosaic=2, val=False,
    )  # fmt: skip
    for epoch, losses in enumerate(history):
        print("epoch", epoch, *losses)

    metrics = model.val(
        data=str(root / "data.yaml"), imgsz=64, batch=8, workers=0, plots=False, verbose=False, project=name
    )
    print("map", float(metrics.box.map50), float(metrics.box.map))
    for result in model.predict(
        sorted((root / "val" / "images").glob("*.png"))[:3], imgsz=64, conf=0.001, verbose=False
    ):
        print("boxes", len(result.boxes), result.boxes.conf[:3].tolist(), result.boxes.xyxy[:1].tolist())
