"""Loops and recursion whose rounds differ: in their number, and in the values that they read, keep, draw,
raise and leave.

In the last iterations, the numbers of rounds are new, unless a test says otherwise.
"""

import random

import pytest
import torch
from helpers import coexecuting, data
from torch import nn

STEPS = 18


def counts(last=6):
    """Numbers of rounds: few at first, once none, and then more than before."""
    return [k % 4 for k in range(STEPS - last)] + [7, 5, 11, 6, 9, 13]


@coexecuting
def test_values_carried_and_exchanged(device):
    for count in counts():
        a, b, c = data(3, 4, seed=count).to(device)
        for _ in range(count):
            a, b = b, a * 0.5 + b.sin()
            c = c + a
        yield a, b * 2, c


@coexecuting(share=0.95)  # stacking a new number of tensors is a new operator call
def test_values_of_chosen_rounds_used_after_the_loop(device):
    for step, count in enumerate(counts()):
        x, kept = data(4, seed=count).to(device), []
        for _ in range(count + 1):
            x = (x * 1.1).sin()
            kept.append(x)
        yield kept[step % len(kept)] * 2, kept[0] + kept[-1], torch.stack(kept).sum(0)


@coexecuting
def test_the_best_of_all_rounds(device):
    for count in counts():
        x = best = data(4, seed=count).to(device)
        for k in range(count):
            x = (x * 3 + k).cos()
            if x.sum() > best.sum():
                best = x
        yield best * 2, x + best


@coexecuting
def test_buffers_written_in_place(device):
    total = torch.zeros(4, device=device)
    for count in counts():
        x, table = data(4, seed=count).to(device), torch.zeros(15, 4, device=device)
        for k in range(count):
            row = table[k]
            row.copy_(x * k).sin_()
            total.mul_(0.5).add_(row)
            x = x - table[k // 2]
        yield table, total.clone(), x * 2


@coexecuting
def test_shapes_that_grow(device):
    for count in counts():
        x = data(1, 4, seed=count).to(device)
        for _ in range(count):
            x = torch.cat([x, x[-1:].cos()])
            x = x.roll(1, 0)
        yield x * 2, x.sum(0)


@coexecuting
def test_random_numbers_and_dropout(device):
    drop = nn.Dropout(0.5)
    for count in counts():
        x = torch.rand(4, device=device)
        for k in range(count):
            x = drop(x) + torch.randn(4, device=device)
            if k % 3 == 2:
                x = x.normal_()
        yield x, torch.rand(2, device=device)


@coexecuting
def test_values_read_in_some_rounds(device):
    for count in counts():
        x, read = data(4, seed=count).to(device), []
        for k in range(count):
            x = x.sin() + 0.1
            if k % 3 == 1:
                read.append(x.sum().item())
            x = x * (1 + sum(read) / 100)
        yield x, read


@coexecuting(share=0.95)  # the exception is first raised late
def test_left_from_the_middle_of_a_round(device):
    for count in counts():
        x = data(4, seed=count).to(device)
        for k in range(99):
            x = x + 0.1
            if k == count:
                break
            x = x.cos()
            try:
                if k % 4 == 3:
                    raise KeyError
                x = x * 2
            except KeyError:
                x = x.neg()
                continue
            x = x - 0.2
        yield x.exp()


@coexecuting
def test_nested_with_counts_of_their_own(device):
    for count in counts():
        x, y = data(2, 4, seed=count).to(device)
        for i in range(count):
            for j in range(i % 3):
                x = x.sin() + y * j
            y = y.cos()
            for _ in range((count - i) % 2):
                y = y + x
        yield x, y


@coexecuting
def test_one_line_from_many_places(device):
    def act(x, y):
        return (x + y).tanh()

    for count in counts():
        x, y, z = data(3, 4, seed=count).to(device)
        for _ in range(count):
            x, y = act(act(x, y), z), act(y, x)
        z = act(z, act(x, y))
        yield x, y, z


@coexecuting
def test_rounds_of_two_loops_in_turn(device):
    def rounds(x, count):
        for _ in range(count):
            x = x.sin() + 0.1
            yield x

    for count in counts():
        x, y = data(2, 4, seed=count).to(device)
        first, second = rounds(x, count), rounds(y, count + 1)
        yield [a + b for a, b in zip(first, second, strict=False)], list(second)


@coexecuting
def test_tensors_that_die_in_any_round(device):
    for count in counts():
        xs = list(data(4, 3, seed=count).to(device))
        for k in range(count):
            xs.append(xs[k % len(xs)] * 2)
            if k % 2:
                del xs[0], xs[k % len(xs)]
        yield torch.stack(xs).sum(0), len(xs)


@coexecuting(share=0.95)  # for a new number of rounds, autograd adds gradients in a new order
def test_gradients_through_loops(device):
    w = data(4).to(device).requires_grad_()
    for count in counts():
        h = data(3, 4, seed=count).to(device)
        states = []
        for _ in range(count + 1):
            h = (h * w).tanh()
            states.append(h)
        loss = sum(s.sum() for s in states[1::2]) + states[-1].pow(2).sum()
        loss.backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
        yield loss.detach(), w.grad, w.detach().clone()
        w.grad = None


@coexecuting
def test_optimizer_steps_within_a_loop(device):
    """Iterations end inside the loop, at the optimizer's steps, whose number grows."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    for count in counts():
        for k in range(count):
            optimizer.zero_grad()
            model(data(3, 4, seed=k).to(device)).pow(2).mean().backward()
            optimizer.step()
        with torch.no_grad():
            yield model(data(2, 4).to(device))


@coexecuting
def test_recursion_deeper_than_ever(device):
    def walk(x, depth):
        if depth == 0:
            return x * 2
        y = walk(x.sin() + 0.1, depth - 1)
        return y.cos() + x

    for count in [*counts()[:-1], 150]:
        yield walk(data(4, seed=count).to(device), count)


@coexecuting
def test_search_that_goes_back(device):
    """Backtracking: outer calls use their values again after inner calls gave up."""

    def search(x, numbers, depth):
        for k in range(3):
            y = (x * (k + 1)).sin()
            if numbers.random() < 0.3:
                return y * 2
            if depth and (found := search(y + x, numbers, depth - 1)) is not None:
                return found - x
        return None

    for step in range(2 * STEPS):
        x = data(4, seed=step).to(device)
        found = search(x, random.Random(step), 3)
        yield x.exp() if found is None else found


@pytest.mark.parametrize("seed", range(8))
def test_random_structure(seed):
    """A random program of loops, branches and calls, whose counts and conditions change in each iteration."""

    def build(numbers, depth):
        kinds = ["op"] * 3 + (["loop", "branch", "call", "sequence"] if depth else [])
        kind, place = numbers.choice(kinds), numbers.random()
        inner = [build(numbers, depth - 1) for _ in range(2)] if kind != "op" else []
        return kind, place, inner

    def run(block, x, pool, numbers):
        kind, place, inner = block
        if kind == "op":
            pool.append(x)
            y = pool[-1 - int(place * 3) % len(pool)]
            if place < 0.25:
                return x.sin() + y
            if place < 0.5:
                return (x * place).add_(0.1)
            return x.cos() * y if place < 0.75 else x.mul_(0.5) - place
        if kind == "loop":
            for _ in range(numbers.randrange(4)):
                x = run(inner[0], x, pool, numbers)
            return x
        if kind == "branch":
            return run(inner[numbers.randrange(2)], x, pool, numbers)
        if kind == "call":
            return run(inner[1], run(inner[0], x, pool[-1:], numbers), pool, numbers)
        for block in inner:
            x = run(block, x, pool, numbers)
        return x

    # The value that a read returns depends on all ops before it, so a few reads are new even in the last
    # iterations.
    @coexecuting(share=0.5)
    def program(device):
        block = "sequence", 0, [build(random.Random(100 * seed + k), 4) for k in range(2)]
        for step in range(40):
            x = data(4, seed=step).to(device)
            yield run(block, x.clone(), [x], random.Random(step))

    program()
