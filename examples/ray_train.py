"""Digits, trained by Ray Train with two workers: `pip install "ray[train]" scikit-learn`.

Nothing but the backend in `TorchConfig` names Tandem. `python examples/ray_train.py gloo` trains on the CPU.
"""

import sys
import tempfile

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    batches = prepare_data_loader(DataLoader(data, batch_size=64, shuffle=True))
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        batches.sampler.set_epoch(epoch)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        metrics = {"losses": losses, "device": next(model.parameters()).device.type}
        if metrics["device"] == "tandem":
            import torch_tandem

            report = torch_tandem.report()
            metrics |= {name: report[name] for name in ("ops_captured", "ops_coexecuted")}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), f"{folder}/model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def fit(backend: str, epochs: int = 3) -> dict:
    """Train and return the metrics of the last epoch."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-2, "epochs": epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend=backend),
    )
    return trainer.fit().metrics


if __name__ == "__main__":
    print(fit(*sys.argv[1:] or ["tandem"]))
