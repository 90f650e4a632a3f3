"""Every public name of `torch.accelerator`. If a new PyTorch adds a name, the test fails until the name is
tried here.
"""

import importlib

import pytest
import torch

DEVICE = torch.device("tandem", 0)


def graph():
    x = torch.zeros(3, device=DEVICE)
    captured = torch.accelerator.Graph()
    with torch.Stream(device="tandem"), captured:
        x += 1
    captured.replay()
    return x.tolist() == [1, 1, 1]


def within_index():
    with torch.accelerator.device_index(0):
        return torch.accelerator.current_device_index() == 0


def converts(dtype):
    x = torch.ones(2, device=DEVICE).to(dtype)
    return x.dtype == dtype and x.to(torch.float32).tolist() == [1, 1]


def capability():
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    return {torch.float32, torch.bfloat16, torch.int64, torch.bool} <= dtypes and all(map(converts, dtypes))


def memory(name):
    def call():
        of = getattr(torch.accelerator.memory, name)
        kept = torch.empty(1000, device=DEVICE)
        return of() == of(0) == of("tandem:0") == of(DEVICE) >= kept.nbytes

    return call


def stats():
    kept = torch.empty(1000, device=DEVICE)
    found = torch.accelerator.memory_stats()
    counts = (found["allocation.all.current"], found["active.all.current"], found["segment.all.peak"])
    return found["allocated_bytes.all.current"] >= kept.nbytes and all(count >= 1 for count in counts)


def reset(name, zeroed):
    def call():
        torch.empty(1000, device=DEVICE)
        getattr(torch.accelerator.memory, name)()
        found = torch.accelerator.memory_stats()
        return found[f"allocated_bytes.all.{zeroed[0]}"] == (found[zeroed[1]] if zeroed[1] else 0)

    return call


def generators(name):
    def call():
        module = importlib.import_module("torch.accelerator.random")
        value = getattr(module, name)()
        return value is not None

    return call


def nothing(call):
    return lambda: call() is None


TRIED = {
    "torch.accelerator": {
        "Graph": graph,
        "current_accelerator": lambda: (
            torch.accelerator.current_accelerator(check_available=True) == torch.device("tandem")
        ),
        "current_device_idx": lambda: torch.accelerator.current_device_idx() == 0,
        "current_device_index": lambda: torch.accelerator.current_device_index() == 0,
        "current_stream": lambda: torch.accelerator.current_stream(DEVICE).device == DEVICE,
        "device_count": lambda: torch.accelerator.device_count() == 1,
        "device_index": within_index,
        "get_device_capability": capability,
        "is_available": lambda: torch.accelerator.is_available(),
        "set_device_idx": nothing(lambda: torch.accelerator.set_device_idx(0)),
        "set_device_index": nothing(lambda: torch.accelerator.set_device_index(DEVICE)),
        "set_stream": nothing(lambda: torch.accelerator.set_stream(torch.accelerator.current_stream())),
        "synchronize": nothing(lambda: torch.accelerator.synchronize(DEVICE)),
    },
    "torch.accelerator.memory": {
        "empty_cache": nothing(lambda: torch.accelerator.memory.empty_cache()),
        "empty_host_cache": nothing(lambda: torch.accelerator.memory.empty_host_cache()),
        "get_memory_info": lambda: torch.accelerator.memory.get_memory_info(0)[0] > 0,
        "max_memory_allocated": memory("max_memory_allocated"),
        "max_memory_reserved": memory("max_memory_reserved"),
        "memory_allocated": memory("memory_allocated"),
        "memory_reserved": memory("memory_reserved"),
        "memory_stats": stats,
        "reset_accumulated_memory_stats": reset("reset_accumulated_memory_stats", ("allocated", None)),
        "reset_peak_memory_stats": reset("reset_peak_memory_stats", ("peak", "allocated_bytes.all.current")),
    },
    "torch.accelerator.random": {
        "get_rng_state": generators("get_rng_state"),
        "get_rng_state_all": generators("get_rng_state_all"),
        "initial_seed": generators("initial_seed"),
    },
    "torch.accelerator.graphs": {"Graph": graph},
}


def public(module):
    """The public names that a module defines or exports. Names of its submodules are tried with the
    submodules.
    """
    named = getattr(module, "__all__", None)
    if named is None:
        named = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return {*named}


def present():
    for name in TRIED:
        try:
            yield name, importlib.import_module(name)
        except ModuleNotFoundError:  # an older PyTorch
            continue


MODULES = dict(present())


def test_no_name_is_missed():
    package = importlib.import_module("torch.accelerator")
    files = {
        name
        for name, value in vars(package).items()
        if type(value) is type(torch)
        and value.__name__.startswith("torch.accelerator.")
        and not name.startswith("_")
    }
    assert {f"torch.accelerator.{name}" for name in files} <= {*TRIED}
    tried = {name for names in TRIED.values() for name in names}
    for name, module in MODULES.items():
        here = tried if module is package else {*TRIED[name]}
        assert public(module) <= here, f"names of {name} that are not tried"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("module", "name"), [(m, n) for m in MODULES for n in TRIED[m]])
def test_each_name_works(module, name):
    if not hasattr(MODULES[module], name):
        pytest.skip("this PyTorch does not have it")
    assert TRIED[module][name]()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.accelerator.set_device_index(1),
        lambda: torch.accelerator.memory_stats(1),
        lambda: torch.accelerator.get_memory_info(1),
        lambda: torch.accelerator.reset_peak_memory_stats(1),
        lambda: torch.accelerator.current_stream(1),
        lambda: torch.accelerator.get_device_capability(1),
    ],
)
def test_a_device_that_does_not_exist(call):
    if torch.__version__ < "2.12" and "capability" in str(call.__code__.co_names):
        pytest.skip("this PyTorch asks the current device only")
    with pytest.raises(RuntimeError, match="there is one device"):
        call()


def test_what_only_other_devices_have_is_refused_in_words():
    event = torch.Event(device="tandem", enable_timing=True)
    event.record()
    with pytest.raises(NotImplementedError, match="ipc is not supported"):
        event.ipc_handle()
    stream = torch.Stream(device="tandem")
    if "native_handle" in dir(torch.Stream):
        with pytest.raises(RuntimeError, match="native handle"):
            _ = stream.native_handle
    if hasattr(stream, "is_capturing"):
        assert not stream.is_capturing()
