"""`torch.profiler` on the wgpu executor: the device's clock measures the kernels."""

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def test_kernels_have_the_device_s_times():
    x = torch.randn(128, 128, device="tandem")

    def step():
        return ((x @ x).relu() * 2).sum().item()

    for _ in range(5):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiled:
        for _ in range(3):
            step()
    rows = {event.key: event for event in profiled.key_averages() if event.device_type == DeviceType.CPU}
    assert rows["aten::mm"].count == 3 and rows["aten::mm"].device_time_total > 0
    kernels = [event for event in profiled.events() if event.device_type == DeviceType.PrivateUse1]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    assert len(spans) >= 6 and all(start <= end for start, end in spans)
    assert sum(end - start for start, end in spans) <= spans[-1][1] - spans[0][0] + 1
