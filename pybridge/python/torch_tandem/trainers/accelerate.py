"""Hugging Face Accelerate, and the Trainer of transformers, which trains with Accelerate.

Accelerate has a list of the devices of out-of-tree backends
(https://github.com/huggingface/accelerate/issues/3813). Its environment variable ACCELERATE_TORCH_DEVICE is
not used here, because it overrules `Accelerator(cpu=True)`, and processes that the program starts inherit it
even if they do not import Tandem.
"""

import functools
import os
from types import ModuleType
from typing import Any

import torch

from torch_tandem import cuda_alias
from torch_tandem.memory import mem_get_info
from torch_tandem.trainers.choices import tandem_instead


def _state(state: ModuleType) -> None:
    partial = state.PartialState
    tandem_instead(partial, "default_device")
    prepare_backend, set_device = partial._prepare_backend, partial.set_device

    @functools.wraps(prepare_backend)
    def backend(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        chosen = prepare_backend(self, cpu, *args, **kwargs)
        if cpu or "LOCAL_RANK" not in os.environ or chosen[1] is not state.DistributedType.NO:
            return chosen
        return "tandem", state.DistributedType.MULTI_GPU

    @functools.wraps(set_device)
    def device(self: Any) -> None:
        if self.device is None and self.backend == "tandem":
            self.device = torch.device("tandem", self.local_process_index % torch.tandem.device_count())
            torch.tandem.set_device(self.device)
        set_device(self)

    partial._prepare_backend, partial.set_device = backend, device


def _random(random: ModuleType) -> None:
    synchronize = random.synchronize_rng_state

    @functools.wraps(synchronize)
    def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
        # A program with several processes on tandem has the type MULTI_GPU, from which Accelerate concludes
        # CUDA.
        if rng_type == random.RNGType.CUDA and not cuda_alias.installed():
            rng_type = random.RNGType.GENERATOR
            generator = torch.tandem.default_generators[torch.tandem.current_device()]
        synchronize(rng_type, generator)

    random.synchronize_rng_state = synchronize_rng_state


def _accelerator(accelerator: ModuleType) -> None:
    _allow_float16(accelerator.Accelerator)
    get_grad_scaler = accelerator.get_grad_scaler

    @functools.wraps(get_grad_scaler)
    def get_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
        if accelerator.AcceleratorState().device.type == "tandem":
            return torch.amp.GradScaler("tandem", **kwargs)
        return get_grad_scaler(distributed_type, **kwargs)

    accelerator.get_grad_scaler = get_scaler


def _allow_float16(kind: type) -> None:
    """Add tandem to the list of devices with float16, which is a constant in the code of the constructor."""
    code = kind.__init__.__code__
    constants = [
        value for value in code.co_consts if isinstance(value, tuple) and {"cuda", "npu"} <= {*value}
    ]
    if len(constants) != 1:
        raise ValueError("the devices with fp16 are not listed in Accelerator.__init__")
    with_tandem = [(*value, "tandem") if value is constants[0] else value for value in code.co_consts]
    kind.__init__.__code__ = code.replace(co_consts=tuple(with_tandem))


def _training_args(training_args: ModuleType) -> None:
    arguments = training_args.TrainingArguments
    choose = arguments.device.fget

    @functools.wraps(choose)
    def device(self: Any) -> torch.device:
        device = choose(self)
        # transformers chooses a device as Accelerate does, but from its own list. Both respect `use_cpu`.
        state = getattr(self, "distributed_state", None)
        return state.device if state and state.device.type == "tandem" else device

    arguments.device = property(device)
    training_args.is_torch_bf16_gpu_available = torch.tandem.is_bf16_supported


def _modeling(modeling: ModuleType) -> None:
    count = modeling.get_max_memory

    @functools.wraps(count)
    def get_max_memory(max_memory: Any = None) -> dict[int | str, int]:
        memory = count(max_memory)
        if max_memory is not None or any(isinstance(device, int) for device in memory):
            return memory
        # The devices' memory is the host's, so it is not offered a second time as "cpu".
        return {index: mem_get_info(index)[0] for index in range(torch.tandem.device_count())}

    modeling.get_max_memory = get_max_memory


CHANGES = {
    "accelerate.state": _state,
    "accelerate.utils.modeling": _modeling,
    "accelerate.utils.random": _random,
    "accelerate.accelerator": _accelerator,
    "transformers.training_args": _training_args,
}
"""Functions that change a module, by the module's name."""
