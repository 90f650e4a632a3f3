"""Programs that leave training to a library. Nothing in them says where it runs.

`python trainers.py NAME [options as NAME=VALUE]` trains with a library and prints the losses as JSON. `place`
is an option for libraries that leave the choice of the device to the program.
"""

import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

PROGRAMS = {}
Losses = list[float]


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def seed(number: int = 0) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def data(size: int = 128) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns examples of a function, as host tensors."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, 8), dtype=np.float32)
    y = np.tanh(x @ rng.standard_normal((8, 1), dtype=np.float32))
    return list(zip(torch.from_numpy(x), torch.from_numpy(y), strict=True))


def network() -> nn.Module:
    seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def loader(shuffle: bool = True) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(data(), 8, shuffle=shuffle)


@contextmanager
def folder_of_all_ranks() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        yield os.environ.get("TRAINERS_FOLDER", own)


# --- Hugging Face ------------------------------------------------------------------------------


@program
def accelerate(mixed_precision: str = "no", dispatch_batches: str = "", cpu: str = "") -> Losses:
    """A loop with accumulation, clipping and a schedule. It saves its state, and trains on from the saved
    state.
    """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(0)
    config = DataLoaderConfiguration(dispatch_batches=bool(dispatch_batches) or None)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=2,
        dataloader_config=config,
        cpu=bool(cpu),
    )
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, loader())

    def epoch() -> Losses:
        losses = []
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        return losses

    with folder_of_all_ranks() as folder:
        epoch()
        accelerator.save_state(folder)
        first = epoch()
        accelerator.load_state(folder)
        # With several processes, even the CPU draws other batches after the state was loaded.
        assert epoch() == first or accelerator.num_processes > 1
    return first


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, use_cache=False, **sizes))


def sentences() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": (words := rng.integers(0, 64, 16).tolist()), "labels": words} for _ in range(48)]


def arguments(folder: str, **options) -> dict:
    """Returns arguments that the trainers of several libraries take."""
    return {
        "output_dir": folder,
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": [],
        **options,
    }


def logged(trainer) -> Losses:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@program
def transformers(precision: str = "", cpu: str = "") -> Losses:
    """`Trainer` with accumulation, clipping and evaluation. A second `Trainer` resumes from a checkpoint."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    mixed = {precision: True} if precision else {}
    chosen = {"use_cpu": True} if cpu else {}
    with folder_of_all_ranks() as folder:
        losses = []
        for resume in (None, f"{folder}/checkpoint-4"):
            options = {
                "gradient_accumulation_steps": 2,
                "max_grad_norm": 0.5,
                "save_steps": 4,
                **mixed,
                **chosen,
            }
            trainer = Trainer(
                llama(),
                TrainingArguments(**arguments(folder, eval_strategy="epoch", **options)),
                train_dataset=sentences(),
                eval_dataset=sentences()[:8],
                data_collator=default_data_collator,
            )
            trainer.train(resume_from_checkpoint=resume)
            losses.append([*logged(trainer), trainer.evaluate()["eval_loss"]])
    assert np.allclose(losses[0], losses[1], atol=1e-6), losses
    return losses[0]


@program
def peft() -> Losses:
    """A low-rank adapter, trained by `Trainer`."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments, default_data_collator

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(llama(), config)
    with folder_of_all_ranks() as folder:
        options = TrainingArguments(**arguments(folder, learning_rate=1e-2, save_strategy="no"))
        trainer = Trainer(model, options, train_dataset=sentences(), data_collator=default_data_collator)
        trainer.train()
    return logged(trainer)


@program
def trl() -> Losses:
    """Supervised fine-tuning on a made-up language."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": sentence["input_ids"]} for sentence in sentences()]
    with folder_of_all_ranks() as folder:
        options = SFTConfig(**arguments(folder, save_strategy="no", max_length=16, bf16=False))
        trainer = SFTTrainer(
            llama(), options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(folder)
        )
        trainer.train()
    return logged(trainer)


def tokenizer(folder: str):
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    path = Path(folder, "vocab.txt")
    path.write_text("\n".join(words))
    return BertTokenizerFast(str(path), eos_token="[SEP]")


@program
def sentence_transformers() -> Losses:
    """Embeddings of sentences, from a BERT with random weights."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    seed()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    pairs = {"anchor": ["a b c", "b c d", "c d a", "d a b"], "positive": ["a b", "b c", "c d", "d a"]}
    with folder_of_all_ranks() as folder:
        tokenizer(folder).save_pretrained(folder)
        BertModel(BertConfig(vocab_size=16, **sizes)).save_pretrained(folder)
        model = SentenceTransformer(modules=[Transformer(folder), Pooling(32)])
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(**arguments(folder, save_strategy="no")),
            train_dataset=Dataset.from_dict({column: texts * 12 for column, texts in pairs.items()}),
            loss=MultipleNegativesRankingLoss(model),
        )
        trainer.train()
    return [*logged(trainer), float(model.encode(["a b"]).sum())]


# --- Lightning ---------------------------------------------------------------------------------


def boring_trainer(package, boring, devices: int | str = 1, **options) -> Losses:
    """Trains Lightning's own example, and trains on from the example's checkpoint."""
    losses = []

    class Model(boring.BoringModel):
        def training_step(self, batch, index):
            out = super().training_step(batch, index)
            losses.append(out["loss"].detach())
            return out

    with folder_of_all_ranks() as folder:
        model, checkpoint = None, None
        for epochs in (2, 3):
            package.seed_everything(0)
            model = model or Model()
            trainer = package.Trainer(
                devices=devices,
                max_epochs=epochs,
                limit_train_batches=10,
                limit_val_batches=2,
                gradient_clip_val=0.5,
                accumulate_grad_batches=2,
                enable_progress_bar=False,
                enable_model_summary=False,
                logger=False,
                default_root_dir=folder,
                **options,
            )
            trainer.fit(model, ckpt_path=checkpoint)
            checkpoint = trainer.checkpoint_callback.best_model_path
        trainer.test(model, verbose=False)
    return [loss.item() for loss in losses]


@program
def lightning(**options) -> Losses:
    """`lightning.pytorch.Trainer`."""
    import lightning.pytorch
    from lightning.pytorch.demos import boring_classes

    return boring_trainer(lightning.pytorch, boring_classes, **options)


@program
def pytorch_lightning(**options) -> Losses:
    """The distribution `pytorch-lightning`, which has a package of its own."""
    import pytorch_lightning
    from pytorch_lightning.demos import boring_classes

    return boring_trainer(pytorch_lightning, boring_classes, **options)


@program
def fabric(**options) -> Losses:
    """A loop with Lightning's `Fabric`."""
    from lightning.fabric import Fabric

    fabric = Fabric(**{"devices": 1, **options})
    fabric.launch()
    fabric.seed_everything(0)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    for x, y in fabric.setup_dataloaders(loader()):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        # The first steps with float16 overflow, until the scale is smaller.
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with folder_of_all_ranks() as folder:
        fabric.save(f"{folder}/state", {"model": model, "optimizer": optimizer})
        fabric.load(f"{folder}/state", {"model": model, "optimizer": optimizer})
    return losses


# --- others ------------------------------------------------------------------------------------


@program
def skorch(**options) -> Losses:
    """A network as an estimator of scikit-learn."""
    from skorch import NeuralNetRegressor

    net = NeuralNetRegressor(
        network, max_epochs=4, lr=0.05, batch_size=8, train_split=None, verbose=0, **options
    )
    x, y = (np.stack(column) for column in zip(*data(), strict=True))
    net.fit(x, y)
    return [*net.history[:, "train_loss"], float(net.predict(x).sum())]


@program
def ignite() -> Losses:
    """A supervised trainer and an evaluator."""
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import MeanSquaredError

    where = getattr(idist, "dev" + "ice")()
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.05))
    losses = []
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), where)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(loader(), max_epochs=2)
    metrics = {"mse": MeanSquaredError(**{"dev" + "ice": where})}
    evaluator = create_supervised_evaluator(model, metrics, where)
    evaluator.run(loader(shuffle=False))
    return [*losses, evaluator.state.metrics["mse"]]


@program
def fastai() -> Losses:
    """A `Learner` with the one-cycle schedule."""
    from fastai.callback.schedule import Learner
    from fastai.data.core import Datasets

    model, rows = network(), data()
    parts = [[lambda index: rows[index][0]], [lambda index: rows[index][1]]]
    loaders = Datasets(range(128), parts, splits=[range(96), range(96, 128)]).dataloaders(bs=8, num_workers=0)
    learner = Learner(loaders, model, loss_func=nn.MSELoss())
    seed()
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2, 1e-2)
    return [float(loss) for loss in learner.recorder.losses]


@program
def timm(place: str = "") -> Losses:
    """A training loop as in timm's scripts."""
    from timm import create_model
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    seed()
    model = create_model("resnet10t", num_classes=4)
    model = model.to(place) if place else model
    average = ModelEmaV3(model, decay=0.5)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.001)
    schedule = CosineLRScheduler(optimizer, 12)
    rng = np.random.default_rng(0)
    losses = []
    for step in range(12):
        x = torch.from_numpy(rng.standard_normal((4, 3, 64, 64), dtype=np.float32))
        y = torch.from_numpy(rng.integers(0, 4, 4))
        x, y = (x.to(place), y.to(place)) if place else (x, y)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        schedule.step(step)
        losses.append(loss.item())
    return losses


@program
def torchmetrics(place: str = "") -> Losses:
    """Metrics that are updated in each step."""
    from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef

    model, metrics = network(), MetricCollection([MeanSquaredError(), PearsonCorrCoef()])
    model, metrics = (model.to(place), metrics.to(place)) if place else (model, metrics)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in loader():
        x, y = (x.to(place), y.to(place)) if place else (x, y)
        out = model(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(out, y).backward()
        optimizer.step()
        metrics.update(out.detach().flatten(), y.flatten())
    return [value.item() for value in metrics.compute().values()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, *options = sys.argv[1:]
    losses = PROGRAMS[name](**dict(option.split("=") for option in options))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n" + json.dumps(losses))
