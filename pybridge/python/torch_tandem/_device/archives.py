"""Files of TorchScript and `torch.export`.

PyTorch writes the devices of tensors into them, and those that traced code names. They get the device that
the program has asked for, "cpu" or "cuda", so that they can be loaded without Tandem. TorchScript's files are
changed after PyTorch, in C++, has written them, and before it reads them.
"""

import functools
import io
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.jit import RecursiveScriptModule, ScriptFunction, ScriptModule

from torch_tandem._program import imports

# A device as a string of a pickle (BINUNICODE, with its length), or in the code of a module.
_DEVICE = re.compile(
    rb"X(?P<size>.)\0\0\0(?P<string>(?:cpu|cuda|tandem)(?::\d+)?)"
    rb'|torch\.device\("(?P<code>(?:cpu|cuda|tandem)(?::\d+)?)"\)',
    re.DOTALL,
)
# Records that PyTorch's writer adds by itself.
_ADDED = ("version", "byteorder", ".data/serialization_id")


class _Names:
    """The devices in files. `tandem` is the name of a device of Tandem, by its index."""

    def __init__(self, tandem: Callable[[int], str], adopts: bool) -> None:
        self.tandem, self.adopts = tandem, adopts

    def saved(self, device: str) -> str:
        kind, _, index = device.partition(":")
        return self.tandem(int(index or 0)) if kind == "tandem" else device

    def loaded(self, device: str, is_code: bool) -> str:
        kind, _, index = device.partition(":")
        is_ours = kind == "cuda" or (kind == "cpu" and self.adopts and is_code)
        return f"tandem:{int(index or 0)}" if is_ours else device


_names: _Names | None = None


def install(tandem: Callable[[int], str], *, adopts: bool = False) -> None:
    """From now on, let files name the device `tandem(index)` instead of Tandem.

    With `adopts`, modules that are loaded without a `map_location` are on Tandem.
    """
    global _names
    is_first, _names = _names is None, _Names(tandem, adopts)
    if not is_first:
        return
    for kind in (ScriptModule, RecursiveScriptModule, ScriptFunction):
        kind.save = _saving(kind.save)
        kind.save_to_buffer = _saving_to_buffer(kind.save_to_buffer)
    load = _loading(torch._C.import_ir_module_from_buffer)
    torch._C.import_ir_module_from_buffer = load
    torch._C.import_ir_module = functools.wraps(torch._C.import_ir_module)(
        lambda unit, path, *options: load(unit, _contents(path), *options)
    )
    imports.watch({"torch._export.serde.serialize": _name_devices})


def _contents(path: Any) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _renamed(data: bytes, rename: Callable[[str, bool], str], path: Any = None) -> bytes:
    """An archive with other devices. It is also written to `path`, if it has changed."""
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    except RuntimeError:  # PyTorch says what is wrong with the file
        return data
    records = {name: reader.get_record(name) for name in reader.get_all_records()}

    def new(match: re.Match[bytes]) -> bytes:
        if (code := match["code"]) is not None:
            return b'torch.device("%s")' % rename(code.decode(), True).encode()
        if len(match["string"]) != match["size"][0]:
            return match[0]
        name = rename(match["string"].decode(), False).encode()
        return b"X%c\0\0\0%s" % (len(name), name)

    changed = {
        name: _DEVICE.sub(new, content)
        for name, content in records.items()
        if name.endswith((".py", ".pkl")) and _DEVICE.search(content)
    }
    if all(records[name] == content for name, content in changed.items()):
        return data
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer if path is None else str(path))
    writer.set_min_version(int(records["version"]))
    for name, content in {**records, **changed}.items():
        if name not in _ADDED:
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return buffer.getvalue()


def _saving(save: Callable) -> Callable:
    @functools.wraps(save)
    def call(self: Any, f: Any, *args: Any, **options: Any) -> Any:
        result = save(self, f, *args, **options)
        _renamed(_contents(f), lambda device, is_code: _names.saved(device), f)
        return result

    return call


def _saving_to_buffer(save: Callable) -> Callable:
    @functools.wraps(save)
    def call(self: Any, *args: Any, **options: Any) -> bytes:
        return _renamed(save(self, *args, **options), lambda device, is_code: _names.saved(device))

    return call


def _loading(load: Callable) -> Callable:
    @functools.wraps(load)
    def call(unit: Any, data: bytes, device: Any = None, *options: Any) -> Any:
        if _names.adopts and device is None and torch._C._get_default_device() == "tandem":
            device = torch.device("tandem", 0)
        return load(unit, _renamed(data, _names.loaded), device, *options)

    return call


def _name_devices(serialize: ModuleType) -> None:
    """Let the descriptions of `torch.export`'s programs name the devices that the program has asked for."""
    device = serialize.Device

    @functools.wraps(device)
    def named(type: str, index: int | None = None) -> Any:
        if type == "tandem":
            type, _, number = _names.tandem(index or 0).partition(":")
            index = int(number) if number else None
        return device(type=type, index=index)

    serialize.Device = named
