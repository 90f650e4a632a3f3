"""A worker process. It reads the names of cases, one per line, and answers each with a line of JSON."""

import json
import os
import sys
import time
import traceback
import warnings

EAGER = "eager "
"""Prefix of a case's name for which only the eager part of the case runs."""


def main(groups: tuple[str, ...]) -> None:
    """Answers requests until the parent closes the pipe."""
    import torch
    import torch_tandem

    from . import agree
    from .cases import NotACase, all_cases

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # C libraries also write to standard output, so answers need a file of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    table = {case.name: case for case in all_cases(groups)}
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, agree.EAGER_ONLY = line.strip().removeprefix(EAGER), line.startswith(EAGER)
        start = time.perf_counter()
        state, why = "passed", ""
        agree.seen.clear()
        try:
            table[name].check()
            torch_tandem.synchronize()
            if agree.seen["refused"] and not agree.seen["accepted"]:
                state, why = "refused", agree.refusals[0]
        except NotACase as reason:
            state, why = "no case", str(reason)
        except AssertionError as error:
            state, why = "failed", str(error)[:600]
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
            state, why = "failed", f"{type(error).__name__} at {place}: {str(error)[:500]}"
        settle(torch_tandem)
        seconds = time.perf_counter() - start
        print(json.dumps([name, state, why, round(seconds, 2)]), file=answers, flush=True)


def settle(torch_tandem: object) -> None:
    """Clears the state that a case has left."""
    try:
        torch_tandem.mark_step()
        torch_tandem.synchronize()
    except Exception:
        pass
    torch_tandem.reset()


if __name__ == "__main__":
    main(tuple(sys.argv[1].split(",")))
