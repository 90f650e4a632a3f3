"""Trains TabNet on tabular data, pretrained on unlabelled rows, and explains its decisions."""

# /// script
# dependencies = ["pytorch-tabnet==4.1.0"]
# ///

import warnings

import numpy as np
import torch
from pytorch_tabnet.pretraining import TabNetPretrainer
from pytorch_tabnet.tab_model import TabNetClassifier, TabNetRegressor

warnings.simplefilter("ignore")
rng = np.random.default_rng(0)

numbers = rng.normal(size=(400, 5)).astype(np.float32)
categories = rng.integers(0, 4, size=(400, 1))
rows = np.concatenate([numbers, categories], 1).astype(np.float32)
labels = ((numbers[:, 0] + (categories[:, 0] == 2) * 2 - 1) > 0).astype(int)
values = (numbers[:, :1] * numbers[:, 1:2]).astype(np.float32)
train, valid = slice(0, 300), slice(300, 400)

shape = {
    "n_d": 8,
    "n_a": 8,
    "n_steps": 3,
    "cat_idxs": [5],
    "cat_dims": [4],
    "cat_emb_dim": 2,
    "seed": 0,
    "verbose": 0,
    "optimizer_params": {"lr": 5e-3},  # at the default of 2e-2 roundings grow fast
}
fit = {"batch_size": 64, "virtual_batch_size": 32, "drop_last": True}

pretrainer = TabNetPretrainer(**shape, mask_type="entmax")
pretrainer.fit(rows[train], eval_set=[rows[valid]], max_epochs=4, pretraining_ratio=0.5, **fit)
print("pretraining", pretrainer.history["loss"])
reconstructed, embedded = pretrainer.predict(rows[valid])
print("reconstruction", reconstructed.shape, float(np.abs(reconstructed).mean()))

classifier = TabNetClassifier(
    **shape,
    mask_type="entmax",
    scheduler_fn=torch.optim.lr_scheduler.StepLR,
    scheduler_params={"step_size": 3, "gamma": 0.9},
)
classifier.fit(
    rows[train],
    labels[train],
    eval_set=[(rows[valid], labels[valid])],
    eval_metric=["auc", "logloss"],
    from_unsupervised=pretrainer,
    weights=1,
    max_epochs=8,
    patience=8,
    **fit,
)
print("classifier", classifier.history["loss"])
print("auc", classifier.history["val_0_auc"])
print("probabilities", classifier.predict_proba(rows[valid])[:3].tolist())
explanation, masks = classifier.explain(rows[valid])
print("importance", classifier.feature_importances_.tolist(), float(explanation.sum()), len(masks))

regressor = TabNetRegressor(**shape)
regressor.fit(
    rows[train], values[train], eval_set=[(rows[valid], values[valid])], max_epochs=6, patience=6, **fit
)
print("regressor", regressor.history["loss"], regressor.history["val_0_mse"])
