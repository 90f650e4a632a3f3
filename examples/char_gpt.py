"""Train a small GPT-2 on the characters of the texts that come with Python."""

import argparse
import codecs
import contextlib
import io
import json
import random
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def corpus() -> str:
    """Return the Zen of Python and the topics of `help()`."""
    with contextlib.redirect_stdout(io.StringIO()):  # the import prints the text
        import this
    from pydoc_data.topics import topics

    return "\n\n".join([codecs.decode(this.s, "rot13"), *topics.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", metavar="FILE", help="write the losses of the steps as JSON")
    args = parser.parse_args()

    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)

    text = corpus()
    alphabet = sorted(set(text))
    number = {letter: index for index, letter in enumerate(alphabet)}
    data = torch.tensor([number[letter] for letter in text], device="cpu")

    config = GPT2Config(
        vocab_size=len(alphabet),
        n_positions=128,
        n_embd=96,
        n_layer=3,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    losses = []
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        length = random.randrange(32, 128)
        starts = [random.randrange(len(data) - length) for _ in range(args.batch_size)]
        batch = torch.stack([data[s : s + length] for s in starts]).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            speed = step / (time.perf_counter() - start)
            print(f"step {step}: loss {sum(losses[-20:]) / 20:.3f}, {speed:.1f} steps/s")

    model.eval()
    prompt = torch.tensor([[number[letter] for letter in "The "]], device=device)
    sample = model.generate(prompt, max_new_tokens=60, do_sample=True, top_k=10, pad_token_id=0)
    print("".join(alphabet[index] for index in sample[0].tolist()))

    if args.losses:
        with open(args.losses, "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    main()
