"""A Hugging Face `Trainer` with a tiny Llama of its own, which learns a made-up language.

The training loop belongs to a library: data loading, collation, gradient clipping and scheduling, callbacks
and the placement of the model and its batches.
"""

import atexit
import gc
from collections.abc import Callable

import torch
from _main import Step, main
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

STEPS = 20
COMPARABLE = None

BATCHES = 4
"""How many a step trains on: each is a call of `Trainer.train`."""
BATCH = 8
WORDS = 64
LONGEST = 48


class Counting(Dataset):
    """Sentences that count on by a stride, with a slip now and then."""

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
    """Training on some batches on `device`, which the trainer chooses unless it is the CPU."""
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
    arguments = TrainingArguments(
        output_dir="unused",
        use_cpu=device == "cpu",
        max_steps=BATCHES,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(compile(LlamaForCausalLM(config)), arguments, train_dataset=Counting(512))
    trainer.remove_callback(PrinterCallback)
    # Each `train` collects garbage; what the libraries made when they were imported is none.
    gc.freeze()
    atexit.register(gc.unfreeze)

    def step() -> float:
        return trainer.train().training_loss

    return step


if __name__ == "__main__":
    main(make, STEPS)
