"""A small BERT from transformers learns to classify sequences.

At every step the logits are converted to NumPy, and scikit-learn computes the script's metrics.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from _main import Step, endless, main
from sklearn.metrics import accuracy_score, f1_score, log_loss
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

STEPS = 20
COMPARABLE = None

CLASSES, VOCABULARY, LENGTH = 4, 1000, 64


def load() -> TensorDataset:
    """Random sentences, in which the words of the sentence's class are slightly more frequent."""
    labels = torch.randint(CLASSES, (512,))
    words = torch.randint(10, VOCABULARY, (512, LENGTH))
    hints = 10 + labels[:, None] * 20 + torch.randint(20, words.shape)
    words = torch.where(torch.rand(words.shape) < 0.3, hints, words)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (512, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return TensorDataset(words * mask, mask, labels)


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(load(), batch_size=8, shuffle=True))
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    model = BertForSequenceClassification(config).to(device)
    model.train()
    net = compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    history: deque[dict[str, float]] = deque(maxlen=50)

    def compute_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        predictions = logits.argmax(axis=-1)
        probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True)).astype("float64")
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        return {
            "accuracy": accuracy_score(labels, predictions),
            "f1": f1_score(labels, predictions, average="macro", zero_division=0),
            "log_loss": log_loss(labels, probabilities, labels=range(CLASSES)),
        }

    def step() -> float:
        input_ids, attention_mask, labels = (tensor.to(device) for tensor in next(batches))
        output = net(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        logits = output.logits.detach().cpu().numpy()
        history.append(compute_metrics(logits, labels.cpu().numpy()))
        return output.loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
