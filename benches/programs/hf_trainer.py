"""A Hugging Face `Trainer` with a randomly initialized tiny Llama, which learns a made-up language.

A library has the training loop: data loading, collation, gradient clipping and scheduling, callbacks, and the
placement of the model and its batches.
"""

import atexit
import gc
import tempfile
from collections.abc import Callable

import torch
from _main import Step, main
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

STEPS = 20
COMPARABLE = None

BATCHES = 4
"""Number of batches per step. Each step is a short run of a trainer; all steps share one optimizer."""
BATCH = 8
WORDS = 64
LONGEST = 48


class Counting(Dataset):
    """Sequences of numbers with a constant stride, with an additional step at 5 % of the positions."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        starts, strides = torch.randint(1, WORDS, (2, size, 1), generator=generator)
        slips = torch.rand(size, LONGEST, generator=generator) < 0.05
        self.sentences = (starts + strides * torch.arange(LONGEST) + slips.cumsum(1)) % WORDS

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sentence = self.sentences[index]
        return {"input_ids": sentence, "labels": sentence}


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step of `BATCHES` batches on `device`, which the trainer chooses unless it is the CPU."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    model = compile(model)
    data = Counting(512)
    runs = 0

    def step() -> float:
        nonlocal runs
        runs += 1
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            use_cpu=device == "cpu",
            seed=runs,
            max_steps=BATCHES,
            per_device_train_batch_size=BATCH,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.remove_callback(PrinterCallback)
        return trainer.train().training_loss

    # Each run of a trainer collects garbage. Freezing exempts the objects that the imports have created.
    gc.freeze()
    atexit.register(gc.unfreeze)
    return step


if __name__ == "__main__":
    main(make, STEPS)
