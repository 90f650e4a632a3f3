"""Forks the ranks of a test of torch.distributed: reads the names of tests, one per line, and answers each in
JSON.

The process imports the packages that the ranks need and uses no device, so that a test costs two forks
instead of two imports of torch. "cuda" and "nccl" mean this device, as under `tandem run`.
"""

import json
import os
import sys
import unittest

LIMIT = 150
"""Time limit of a test, in seconds."""


def main(size: int) -> None:
    """Answers requests until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {
        "BACKEND": "nccl",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT),
    }
    import torch
    from torch_tandem import cuda_alias

    cuda_alias.install()
    torch.set_num_threads(1)
    group = tests()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        result = unittest.TestResult()
        unittest.TestSuite([group(line.strip())]).run(result)
        wrong = result.errors + result.failures
        skipped = result.skipped[0][1] if result.skipped else None
        print(json.dumps([skipped, wrong[0][1] if wrong else None]), file=answers, flush=True)


def tests() -> type[unittest.TestCase]:
    """Returns the class of the installed torch whose tests fork processes."""
    from torch import multiprocessing
    from torch.testing._internal.distributed import distributed_test

    # ResNet-50 takes hours on a CPU, because its images are 1000 x 1000. The other models of the same tests
    # do not.
    distributed_test.HAS_TORCHVISION = False

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Forked


if __name__ == "__main__":
    main(int(sys.argv[1]))
