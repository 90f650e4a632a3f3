"""A tiny Whisper from transformers learns to name the notes of synthetic recordings.

transformers' feature extractor computes the spectrograms from NumPy arrays.
"""

from collections.abc import Callable

import numpy as np
import torch
from _main import Step, main
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

STEPS = 20
COMPARABLE = None

BATCH, NOTES, SECONDS = 4, 6, 2
RATE = 16_000
"""Samples per second, as Whisper expects."""
SCALE = 24
"""Number of different notes, a semitone apart."""
START, END, FIRST = 0, 1, 2


def record(rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """Return a recording of a few notes with noise, and the notes."""
    notes = rng.integers(SCALE, size=NOTES)
    seconds = np.arange(SECONDS * RATE // NOTES) / RATE
    sound = np.concatenate([np.sin(2 * np.pi * 220 * 2 ** (note / 12) * seconds) for note in notes])
    return (sound + 0.1 * rng.standard_normal(len(sound))).astype(np.float32), (FIRST + notes).tolist()


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    rng = np.random.default_rng(0)
    extract = WhisperFeatureExtractor(feature_size=40, chunk_length=SECONDS, sampling_rate=RATE)
    config = WhisperConfig(
        vocab_size=FIRST + SCALE,
        num_mel_bins=40,
        d_model=96,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=SECONDS * 50,
        max_target_positions=16,
        dropout=0.1,
        decoder_start_token_id=START,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).to(device)
    model.train()
    net = compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        sounds, notes = zip(*(record(rng) for _ in range(BATCH)), strict=True)
        features = extract(list(sounds), sampling_rate=RATE, return_tensors="pt").input_features.to(device)
        labels = torch.tensor([[*written, END] for written in notes], device=device)
        output = net(input_features=features, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return output.loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
