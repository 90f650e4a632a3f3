"""A convolutional classifier trained by Trainer with validation, checkpoints, averaging and clipping."""

# /// script
# dependencies = ["lightning==2.6.6", "torchmetrics==1.9.0"]
# ///

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Images(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(0, 4, (480,), generator=generator)
        images = torch.randn(480, 1, 16, 16, generator=generator)
        for label in range(4):
            images[labels == label, :, 4 * label : 4 * label + 4] += 1
        self.parts = torch.utils.data.random_split(TensorDataset(images, labels), [320, 80, 80], generator)

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=40)

    def test_dataloader(self):
        return DataLoader(self.parts[2], batch_size=40)

    predict_dataloader = test_dataloader


class Classifier(L.LightningModule):
    def __init__(self, width: int = 16, rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d((4, 1)),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, 4),
        )
        self.accuracy = MulticlassAccuracy(4)

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", self.accuracy)

    def test_step(self, batch, index):
        images, labels = batch
        self.log("test_loss", nn.functional.cross_entropy(self(images), labels))

    def predict_step(self, batch, index):
        return self(batch[0]).softmax(-1)

    def on_train_epoch_end(self):
        print("loss", self.trainer.callback_metrics["train_loss_epoch"].item())

    def on_validation_epoch_end(self):
        print("validated", self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


L.seed_everything(0)
checkpoints = ModelCheckpoint("checkpoints", monitor="val_loss", save_top_k=2)
trainer = L.Trainer(
    max_epochs=6,
    gradient_clip_val=0.5,
    callbacks=[checkpoints, EarlyStopping("val_loss", patience=4), StochasticWeightAveraging(0.005, 0.7)],
    logger=False,
    num_sanity_val_steps=0,
    enable_progress_bar=False,
    enable_model_summary=False,
)
images = Images()
trainer.fit(Classifier(), datamodule=images)
print("best", checkpoints.best_model_score.item())
tested = trainer.test(ckpt_path="best", datamodule=images, verbose=False, weights_only=False)
print("test_loss", tested[0]["test_loss"])
predicted = torch.cat(trainer.predict(datamodule=images, ckpt_path="best", weights_only=False))
print("predicted", *predicted.mean(0).tolist())
