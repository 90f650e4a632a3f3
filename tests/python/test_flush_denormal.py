"""`torch.set_flush_denormal` applies to all threads that compute, so bits do not depend on the number of
threads.
"""

import pytest
import torch
import torch_tandem
from helpers import OWN


@pytest.mark.skipif(not OWN, reason="OpenMP's threads keep what they began with, in eager PyTorch, too")
@pytest.mark.parametrize("threads", [1, 2])
def test_all_threads_flush_denormal_numbers(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = torch.full((1 << 20,), 2e-38).to("tandem")
    made = {}
    try:
        # In the first round, the threads are started before the setting changes.
        for flush in (False, True, False, True):
            if not torch.set_flush_denormal(flush):
                pytest.skip("the CPU cannot")
            for _ in range(8):
                # Bits are counted, because PyTorch's threads may treat denormal numbers as zeros.
                made.setdefault(flush, []).append((x * 0.25).view(torch.int32).count_nonzero())
                torch_tandem.mark_step()
        assert {count.item() for count in made[False]} == {x.numel()}
        assert {count.item() for count in made[True]} == {0}
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
