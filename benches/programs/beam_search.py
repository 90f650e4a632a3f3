"""Beam search with the translator of seq2seq.py.

Python keeps the hypotheses as lists, reads every word from the device, and leaves the loop as soon as all
beams have ended.
"""

import random
from collections.abc import Callable

import torch
from _main import Step, main
from seq2seq import BEGIN, END, WORDS, Decoder, Encoder

STEPS = 20
COMPARABLE = None

SENTENCES = 3
BEAMS = 5
LONGEST = 30


@torch.no_grad()
def search(encode: Callable, decode: Callable, source: torch.Tensor) -> tuple[float, list[int]]:
    """Return the score of the best translation of a sentence, and the translation."""
    device = source.device
    memory = encode(source.unsqueeze(0)).expand(BEAMS, -1, -1)
    state = memory[:, -1]
    word = torch.full((BEAMS,), BEGIN, device=device)
    ended = torch.zeros(BEAMS, dtype=torch.bool, device=device)
    # All beams are equal at first, so only the first of them is continued.
    scores = torch.full((BEAMS,), -torch.inf, device=device)
    scores[0] = 0
    # A beam that has ended can only be continued with further end symbols, which do not change its score.
    only_end = torch.full((WORDS,), -torch.inf, device=device)
    only_end[END] = 0
    hypotheses: list[list[int]] = [[] for _ in range(BEAMS)]

    for _ in range(LONGEST):
        logits, state = decode(word, state, memory)
        gains = torch.where(ended.unsqueeze(1), only_end, torch.log_softmax(logits, dim=1))
        scores, best = (scores.unsqueeze(1) + gains).flatten().topk(BEAMS)
        parents, word = best // WORDS, best % WORDS
        state = state[parents]
        ended = ended[parents] | (word == END)
        hypotheses = [[*hypotheses[p], w] for p, w in zip(parents.tolist(), word.tolist(), strict=True)]
        if ended.all().item():
            break

    ranked = [
        (score / len(words), words)
        for score, words in zip(scores.tolist(), map(without_end, hypotheses), strict=True)
    ]
    return max(ranked)


def without_end(words: list[int]) -> list[int]:
    """Return a hypothesis up to and including its first end symbol."""
    return words[: words.index(END) + 1] if END in words else words


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step on `device` that translates some sentences and returns their mean score."""
    rng = random.Random(0)
    encoder, decoder = Encoder().to(device), Decoder().to(device)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(3)  # makes the predictions of the untrained decoder less uniform
        decoder.out.bias[END] += 1.5
    encode, decode = compile(encoder), compile(decoder)

    def step() -> float:
        scores = []
        for _ in range(SENTENCES):
            source = torch.tensor([rng.randrange(2, WORDS) for _ in range(rng.randint(6, 14))])
            score, _ = search(encode, decode, source.to(device))
            scores.append(score)
        return sum(scores) / len(scores)

    return step


if __name__ == "__main__":
    main(make, STEPS)
