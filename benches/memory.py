"""Memory of each program in its steady state, in eager PyTorch and on Tandem's cpu executor.

*Tensors* is the peak of bytes that allocators had in use. PyTorch's profiler reports it for PyTorch's
allocator. For Tandem, the peak of Tandem's pool is added, although the two peaks may occur at different
times. *Resident* is the resident memory of the process after all steps. Each figure is measured in a separate
process.
"""

import argparse
import multiprocessing
from multiprocessing.connection import Connection

import torch
from measure import RUNNERS, load
from tables import table, write_section

# Number of steps of the warm-up, after which Tandem's pool has returned the memory that only the first,
# traced steps needed; and number of measured steps.
WARM_UP, STEPS = 28, 4
TEN = [
    "resnet50",
    "dropblock",
    "sdpoint",
    "dcgan",
    "yolov3",
    "faster_rcnn",
    "bert_qa",
    "bert_cls",
    "gpt2",
    "music_transformer",
]


def tensors(runner_of: type, name: str) -> int:
    """Return the peak number of bytes of tensors in the last steps."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        runner = runner_of(load(name))
        for _ in range(WARM_UP):
            runner.step()
        runner.wait()
        pool = runner.count_pool()
        with record_function("steady state"):
            for _ in range(STEPS):
                runner.step()
            runner.wait()
    events = profiler.profiler.kineto_results.events()
    begin = next(e.start_ns() for e in events if e.name() == "steady state")
    held, most = 0, 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held) if event.start_ns() >= begin else held
    return most + pool()


def resident(runner_of: type, name: str) -> int:
    """Return the resident bytes of the process after all steps."""
    runner = runner_of(load(name))
    for _ in range(WARM_UP + STEPS):
        runner.step()
    runner.wait()
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def child(connection: Connection, what: str, way: str, name: str) -> None:
    torch.set_num_threads(2)
    connection.send(globals()[what](RUNNERS[way], name))


def measure(what: str, way: str, name: str) -> int:
    """Measure one figure in a separate process that is forked after all imports."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=child, args=(theirs, what, way, name))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(f"{name} failed in the way {way!r}") from None
    finally:
        process.join(5)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=TEN, help="the paper's ten unless given")
    options = parser.parse_args()
    mib = 1 << 20
    rows = []
    for name in options.programs:
        load(name)
        most = [measure("tensors", way, name) for way in ("eager", "tandem")]
        rss = [measure("resident", way, name) for way in ("eager", "tandem")]
        figures = [f"{b / mib:.1f}" for b in most] + [f"{most[1] / most[0]:.2f}"]
        figures += [f"{b / mib:.0f}" for b in rss] + [f"{(rss[1] - rss[0]) / mib:+.0f}"]
        rows.append([name, *figures])
        print(rows[-1], flush=True)
    head = ["program", "tensors, eager", "Tandem", "Tandem / eager", "resident, eager", "Tandem", "more"]
    write_section("memory.py", f"In MiB:\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
