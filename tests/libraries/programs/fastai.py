"""A tabular learner on categories and numbers: one-cycle schedules, metrics, and predictions."""

# /// script
# dependencies = ["fastai==2.8.12"]
# ///

import numpy as np
import pandas as pd
from fastai.tabular.all import (
    Categorify,
    CategoryBlock,
    FillMissing,
    Normalize,
    RandomSplitter,
    SaveModelCallback,
    TabularDataLoaders,
    accuracy,
    set_seed,
    tabular_learner,
)

set_seed(0, reproducible=True)
rng = np.random.default_rng(0)
rows = 1200
table = pd.DataFrame(
    {
        "color": rng.choice(["red", "green", "blue"], rows),
        "shape": rng.choice(["round", "square"], rows),
        "width": rng.normal(2, 1, rows).astype(np.float32),
        "height": rng.normal(-1, 3, rows).astype(np.float32),
        "weight": rng.exponential(1, rows).astype(np.float32),
    }
)
score = table.width * (table.color == "red") - table.height * (table["shape"] == "round") + table.weight
table["size"] = np.where(score > score.median(), "large", "small")
table.loc[::17, "weight"] = np.nan

loaders = TabularDataLoaders.from_df(
    table,
    procs=[Categorify, FillMissing, Normalize],
    cat_names=["color", "shape"],
    cont_names=["width", "height", "weight"],
    y_names="size",
    y_block=CategoryBlock(),
    splits=RandomSplitter(seed=1)(table),
    bs=64,
    num_workers=0,
)
learner = tabular_learner(loaders, layers=[64, 32], metrics=accuracy, config={"ps": [0.1, 0.1]})
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(4, 1e-2, wd=0.05, cbs=SaveModelCallback(fname="best"))
    learner.fit_flat_cos(2, 1e-3)
    for values in learner.recorder.values:
        print("epoch", *map(float, values))
    print("last losses", *[float(loss) for loss in learner.recorder.losses[-5:]])
    print("validated", *map(float, learner.validate()))
    probabilities, targets = learner.get_preds()
    print("probabilities", *probabilities.mean(0).tolist(), "targets", targets.sum().item())
    fresh = learner.dls.test_dl(table.drop(columns="size").iloc[:8])
    for row in learner.get_preds(dl=fresh)[0]:
        print("predicted", *row.tolist())
