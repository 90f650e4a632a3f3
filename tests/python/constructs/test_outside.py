"""Programs that reach outside of PyTorch: values that are read, text, NumPy, debuggers, threads, signals,
files.
"""

import concurrent.futures
import contextlib
import io
import json
import logging
import math
import pdb
import queue
import random
import signal
import sys
import threading
import traceback
import warnings

import numpy as np
import torch
from helpers import coexecuting, data

STEPS = 18

# --- values read --------------------------------------------------------------------------------


@coexecuting
def test_arithmetic_on_items(device):
    x = data(4).to(device)
    for _ in range(STEPS):
        total = x.sum().item()
        angle = math.atan2(total, float(x[0])) + round(total, 2) % 1
        x = (x * math.cos(angle) + math.hypot(angle, 1) / 10).clamp(-2, 2)
        yield x, angle, int(x.argmax()), complex(x[1]), x.tolist()


@coexecuting
def test_tensors_as_numbers(device):
    table = data(5, 4).to(device)
    for step in range(STEPS):
        k = torch.tensor(step % 4, device=device)
        x = table[k] * 2
        row = list(range(5))[k] + divmod(7, int(k + 1))[1]
        yield x[: k + 1].sum(), x * k, "ab" * int(k), [x.size(0)] * k, table[row % 5, k], f"{k:03d}"


@coexecuting
def test_random_module(device):
    numbers, x = random.Random(0), data(4).to(device)
    for _ in range(STEPS):
        act = numbers.choice([torch.sin, torch.cos])
        x = act(x) * numbers.uniform(0.5, 1.5)
        if numbers.random() < 0.5:
            x = x + numbers.gauss(0, 1)
        y = numbers.sample(range(4), 2)
        yield x[y] * 2, np.random.rand(), torch.rand(2, device=device)


@coexecuting
def test_numpy_round_trips(device):
    x = data(3, 4).to(device)
    for step in range(STEPS):
        array = x.cpu().numpy()
        array = np.where(array > 0, np.sqrt(np.abs(array)), array).astype(np.float32)
        array[step % 3] = array.mean(0)
        x = torch.from_numpy(array).to(device) * 0.9 + torch.as_tensor(np.float32(0.1), device=device)
        total = np.add.reduce(np.asarray(x.cpu()), axis=1)
        yield x, float(array.sum()), torch.tensor(total).to(device).sin()


# --- text ---------------------------------------------------------------------------------------


@coexecuting(share=0.5)
def test_print_and_format(device):
    """Printing a tensor runs operators on it, to find the width and sign of its numbers; some of these run
    for each value.
    """
    text = io.StringIO()
    for step in range(STEPS):
        x = data(2, 2, seed=step % 3).to(device)
        with contextlib.redirect_stdout(text):
            print(x.cpu(), x.shape, x.sum().item())
        y = x.sin()
        said = f"{y[0, 0]:.3f} {y.mean().item():>8.2e} {y.dtype} {str(y.cpu())!s:.20}"
        shown = repr(y).split("device")[0].rstrip(", )")
        yield y * 2, said, shown, len(text.getvalue())


@coexecuting
def test_logging_and_warnings(device):
    text = io.StringIO()
    log = logging.Logger("program", logging.INFO)
    log.addHandler(logging.StreamHandler(text))
    for step in range(STEPS):
        x = data(4, seed=step % 3).to(device)
        log.log(logging.INFO if step % 2 else logging.DEBUG, "sum %s", x.sum())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if x.sum() > 0:
                warnings.warn("positive", stacklevel=1)
            x = x * 2
        yield x, len(caught), "sum" in text.getvalue()


@coexecuting
def test_json_and_text_files(device, name="values"):
    x = data(4).to(device)
    for _ in range(STEPS):
        text = json.dumps({name: x.tolist()})
        x = torch.tensor(json.loads(text)[name], device=device).cos()
        with io.StringIO(text) as file:
            x = x + len(file.readline()) / 100
        yield x, len(text)


# --- debuggers ----------------------------------------------------------------------------------


@coexecuting
def test_breakpoint(device):
    def stop(*args, **kwargs):
        frame = sys._getframe(1)
        seen.append(frame.f_locals["x"].sum())

    seen, hook = [], sys.breakpointhook
    sys.breakpointhook = stop
    try:
        for step in range(STEPS):
            x = data(4, seed=step).to(device)
            if step % 3 == 1:
                breakpoint()
            x = x.sin()
            breakpoint()
            yield x * 2, seen[-1]
    finally:
        sys.breakpointhook = hook


@coexecuting
def test_debugger(device):
    """A session in pdb goes up and down the stack, looks at values, computes, changes a variable, steps, and
    goes on.
    """

    def step_of(x, k):
        if k % 3 == 1:
            pdb.Pdb(stdin=io.StringIO(commands), stdout=said, nosigint=True, readrc=False).set_trace()
        y = x.sin()
        return y + 1

    commands = "p x.shape\nx = x * 2\nup\np step\ndown\nnext\np y.sum().item()\ncontinue\n"
    said = io.StringIO()
    for step in range(STEPS):
        yield step_of(data(4, seed=step).to(device), step)
    assert said.getvalue().count("torch.Size([4])") == STEPS // 3


@coexecuting
def test_trace_and_profile_functions(device):
    def traced(frame, event, arg):
        if event == "line" and "y" in frame.f_locals:
            seen.append(frame.f_locals["y"].sum())
        return traced

    def work(x, k):
        y = x.sin()
        for _ in range(k):
            y = y * 2
        return y

    calls = []
    for step in range(STEPS):
        seen, x = [], data(3, seed=step).to(device)
        before, settrace = sys.gettrace(), sys.settrace if step % 2 else sys.setprofile
        settrace(traced if step % 2 else lambda frame, event, arg: calls.append(event))
        try:
            x = work(x, step % 3)
        finally:
            sys.setprofile(None)
            sys.settrace(before)
        yield x, seen, len(calls) > 0


@coexecuting
def test_tracebacks(device):
    def fail(x):
        inner = x.exp()
        raise ValueError(inner.numel())

    for step in range(STEPS):
        x = data(3, seed=step).to(device)
        try:
            fail(x)
        except ValueError as error:
            frames = traceback.extract_tb(error.__traceback__)
            inner = error.__traceback__.tb_next.tb_frame.f_locals["inner"]
            yield inner * 2, [frame.name for frame in frames][-1]


# --- threads ------------------------------------------------------------------------------------


@coexecuting
def test_thread_hands_over_work(device):
    """Another thread's operators run at once, while the program's own operators are co-executed."""
    asked, done = queue.Queue(), queue.Queue()

    def work():
        while (x := asked.get()) is not None:
            done.put(x.exp() if x.sum() > 0 else x * 2)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for step in range(STEPS):
            x = data(4, seed=step % 6).to(device)
            asked.put(x.sin())
            y = x.cos()
            yield done.get() + y
    finally:
        asked.put(None)
        worker.join()


@coexecuting
def test_thread_pools_locks_and_thread_locals(device):
    local, lock = threading.local(), threading.Lock()

    def load(seed):
        with lock:
            local.count = getattr(local, "count", 0) + 1
            return data(4, seed=seed).to(device) * 2

    local.x = data(4).to(device)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for step in range(STEPS):
            futures = [pool.submit(load, step + k) for k in range(step % 3)]
            local.x = local.x.sin()
            loaded = [x + 1 for x in pool.map(load, [step])]
            yield local.x, loaded, sum(f.result() for f in futures)


@coexecuting
def test_timers_that_set_flags(device):
    for step in range(STEPS):
        x, flag = data(4, seed=step).to(device), threading.Event()
        timer = threading.Timer(0.0, flag.set)
        if step % 2:
            timer.start()
            flag.wait()
        x = x.sin() if flag.is_set() else x.cos()
        timer.cancel()
        yield x


# --- signals ------------------------------------------------------------------------------------


@coexecuting
def test_signal_handlers(device):
    def handle(number, frame):
        handled.append(frame.f_locals["x"].sin())
        if len(handled) == 2:
            raise TimeoutError

    handled, before = [], signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, handle)
    try:
        for step in range(STEPS):
            handled, x = [], data(4, seed=step).to(device)
            try:
                for _ in range(step % 3):
                    x = x * 2
                    signal.raise_signal(signal.SIGUSR1)
            except TimeoutError:
                x = x.neg()
            yield x + 1, handled
    finally:
        signal.signal(signal.SIGUSR1, before)


@coexecuting
def test_interrupts_that_are_caught(device):
    x = data(4).to(device)
    for step in range(STEPS):
        try:
            x = x.sin()
            if step % 4 == 3:
                signal.raise_signal(signal.SIGINT)
            x = x * 2
        except KeyboardInterrupt:
            x = x + 1
        yield x.clone()
