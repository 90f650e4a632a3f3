"""Networks as estimators of scikit-learn: pipelines, callbacks, a grid search, and saved parameters."""

# /// script
# dependencies = ["skorch==1.4.0", "scikit-learn==1.9.1"]
# ///

import numpy as np
import torch
from sklearn.datasets import make_classification, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import EarlyStopping, EpochScoring, GradientNormClipping, LRScheduler
from skorch.dataset import ValidSplit
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs: int = 16, width: int = 32, outputs: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, outputs),
        )

    def forward(self, x):
        return self.layers(x)


torch.manual_seed(0)
np.random.seed(0)
x, y = make_classification(400, 16, n_informative=8, n_classes=3, random_state=0)
x, y = x.astype(np.float32), y.astype(np.int64)

classifier = NeuralNetClassifier(
    Net,
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    lr=0.01,
    max_epochs=8,
    batch_size=64,
    train_split=ValidSplit(0.2, random_state=0, stratified=True),
    iterator_train__shuffle=True,
    callbacks=[
        EpochScoring("f1_macro", lower_is_better=False, name="f1"),
        LRScheduler(policy="StepLR", step_size=4, gamma=0.5),
        GradientNormClipping(1.0),
        EarlyStopping(patience=5),
    ],
    verbose=0,
)
pipeline = make_pipeline(StandardScaler(), classifier)
pipeline.fit(x, y)
for row in classifier.history[:, ("train_loss", "valid_loss", "valid_acc", "f1")]:
    print("epoch", *map(float, row))
print("probabilities", *pipeline.predict_proba(x).mean(0).tolist(), "score", float(pipeline.score(x, y)))
classifier.save_params(f_params="params.pt", f_optimizer="optimizer.pt")
again = NeuralNetClassifier(Net, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam).initialize()
again.load_params(f_params="params.pt", f_optimizer="optimizer.pt")
print("loaded", float((again.predict(x) == classifier.predict(x)).mean()))

search = GridSearchCV(
    NeuralNetClassifier(
        Net, criterion=nn.CrossEntropyLoss, lr=0.1, max_epochs=2, train_split=None, verbose=0
    ),
    {"module__width": [8, 32], "optimizer__momentum": [0.0, 0.9]},
    cv=2,
    scoring="neg_log_loss",
)
search.fit(x, y)
print("grid", *map(float, search.cv_results_["mean_test_score"]))
print("best", search.best_params_["module__width"], search.best_params_["optimizer__momentum"])

x, y = make_regression(256, 16, n_informative=6, noise=1.0, random_state=1)
x, y = x.astype(np.float32), (y[:, None] / y.std()).astype(np.float32)
regressor = NeuralNetRegressor(
    Net, module__outputs=1, lr=0.05, max_epochs=4, batch_size=32, train_split=None, verbose=0
)
print("r2", *map(float, cross_val_score(regressor, x, y, cv=3, scoring="r2")))
