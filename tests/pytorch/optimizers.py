"""Every optimizer of PyTorch's database, in each implementation: steps, closures, states, schedulers."""

import copy
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_optimizers import optim_db

from .agree import agree
from .cases import Case, NotACase

STEPS = 6
"""Number of steps of a program. The last steps are co-executed."""

IMPLEMENTATIONS = ("default", "foreach", "fused", "differentiable", "capturable")


def cases() -> Iterator[Case]:
    """Yields a case for each optimizer, check and implementation."""
    for info in optim_db:
        for implementation in IMPLEMENTATIONS:
            if not has(info, implementation):
                continue
            for name, way in WAYS.items():
                if name == "complex" and (not info.supports_complex or implementation == "fused"):
                    continue
                if name == "groups" and not info.supports_param_groups:
                    continue
                if (implementation == "differentiable") != (name == "differentiable"):
                    continue
                check = functools.partial(optimizer, info, implementation, way)
                yield Case(f"optimizers/{name}/{info.name}.{implementation}/float32", check)


def has(info: Any, implementation: str) -> bool:
    """Whether an optimizer has an implementation."""
    if implementation == "default":
        return True
    if implementation == "capturable":
        return info.has_capturable_arg
    if implementation == "fused":
        return "cpu" in info.supports_fused_on
    return implementation in info.supported_impls


def optimizer(info: Any, implementation: str, way: Callable[..., Any]) -> None:
    """Runs a check with each of the optimizer's options."""
    if info.only_supports_sparse_grads:
        raise NotACase("it takes sparse gradients only")
    # The inputs for CUDA include the capturable options.
    options = info.optim_inputs_func(device="cuda" if implementation == "capturable" else "cpu")
    for given in options:
        if implementation == "capturable" and not given.kwargs.get("capturable"):
            continue

        def program(
            device: str, given: Any = given, dtype: torch.dtype = torch.float32, rounded: int = 0
        ) -> Any:
            settings = dict(given.kwargs)
            if implementation not in ("default", "capturable"):
                settings[implementation] = True
            if device == "cpu":
                settings.pop("capturable", None)
            settings = {k: moved_number(v, device, implementation) for k, v in settings.items()}
            kind = dtype.to_complex() if way is complex_parameters else dtype
            parameters = made(device, kind, info.optim_cls is not torch.optim.LBFGS, rounded)
            return way(info, parameters, settings)

        place = f"{given.desc or given.kwargs}"
        exact = functools.partial(program, dtype=torch.float64)
        # Line searches amplify the last bit, and maximizing a sum of squares diverges. The distances between
        # such runs vary by a factor of ten, so it takes many runs to find the largest distance.
        rounded = [functools.partial(program, rounded=draw) for draw in range(1, 24)]
        agree(program, place, exact=exact, rounded=rounded, bits=False)


def moved_number(value: Any, device: str, implementation: str) -> Any:
    """Moves tensors among the options to the device for capturable optimizers, and to the host for others."""
    if isinstance(value, tuple):
        return tuple(moved_number(v, device, implementation) for v in value)
    if isinstance(value, torch.Tensor):
        value = value.clone()
        return value.to(device) if implementation in ("capturable", "fused") else value
    return value


def made(device: str, dtype: torch.dtype, strided: bool, rounded: int) -> list[torch.nn.Parameter]:
    """Returns the parameters of a small model, one of them non-contiguous if the optimizer supports that.

    If `rounded` is not 0, some values are changed by one rounding. The number seeds the choice of the values.
    """
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 3), (3, 5), (7, 2))
    values = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    if rounded:
        draws = torch.Generator().manual_seed(rounded)
        roundings = torch.finfo(dtype).eps
        values = [v * (1 + roundings * torch.randint(-1, 2, v.shape, generator=draws)) for v in values]
    if strided:
        values[1] = values[1].t().contiguous().t()
    return [torch.nn.Parameter(v.to(device)) for v in values]


def gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    """Sets gradients that depend on the parameters. In some steps, one parameter has no gradient."""
    for number, p in enumerate(parameters):
        if number == 2 and step % 3 == 2:
            p.grad = None
            continue
        p.grad = (p.detach() * 0.3 + 0.1 * (step + 1)).clone()


def trained(optimizer: Any, parameters: list[torch.nn.Parameter], first: int = 0, steps: int = STEPS) -> None:
    """Runs some steps."""
    for step in range(first, first + steps):
        gradients(parameters, step)
        run(optimizer, parameters)


def run(optimizer: Any, parameters: list[torch.nn.Parameter]) -> Any:
    """Runs a step of an optimizer that may need a closure."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p * p.conj()).real.sum() for p in parameters)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step(closure)
    return optimizer.step()


def state(optimizer: Any) -> Any:
    """Returns an optimizer's state. Zero-dimensional tensors are moved to the host, where some
    implementations keep step counts.
    """
    entries = optimizer.state_dict()["state"]
    return {i: {k: plain(v) for k, v in entry.items()} for i, entry in entries.items()}


def plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def steps(info: Any, parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Returns parameters and state after steps."""
    optimizer = info.optim_cls(parameters, **settings)
    trained(optimizer, parameters)
    return parameters, state(optimizer)


complex_parameters = functools.wraps(steps)(lambda *given: steps(*given))


def groups(info: Any, parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Runs parameter groups with different options. One group is added between steps."""
    optimizer = info.optim_cls(
        [{"params": parameters[:1]}, {"params": parameters[1:2], "lr": 0.002}], **settings
    )
    trained(optimizer, parameters[:2])
    optimizer.add_param_group({"params": parameters[2:]})
    trained(optimizer, parameters, STEPS)
    return parameters, [g["lr"] for g in optimizer.param_groups]


def closures(info: Any, parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Returns the losses that steps with closures return."""
    optimizer = info.optim_cls(parameters, **settings)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in parameters)
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(STEPS)]
    return [torch.as_tensor(loss).detach() for loss in losses], parameters


def states(info: Any, parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Saves a state, loads it into an optimizer of copied parameters, and copies the optimizer deeply. All of
    them must continue equally.
    """
    optimizer = info.optim_cls(parameters, **settings)
    trained(optimizer, parameters)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    loaded = info.optim_cls(others, **settings)
    loaded.load_state_dict(torch.load(file, weights_only=False))
    from_host = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    hosted = info.optim_cls(from_host, **settings)
    file.seek(0)
    hosted.load_state_dict(torch.load(file, map_location="cpu", weights_only=False))
    copied = copy.deepcopy(optimizer)
    copies = [p for g in copied.param_groups for p in g["params"]]
    for one, theirs in ((optimizer, parameters), (loaded, others), (hosted, from_host), (copied, copies)):
        trained(one, theirs, STEPS, 3)
    return parameters, others, from_host, copies, state(loaded), state(hosted)


def schedulers(info: Any, parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Returns the learning rates of the database's schedulers."""
    rates = []
    for chain in info.scheduler_inputs:
        optimizer = info.optim_cls(parameters, **settings)
        chained = [make(optimizer) for make in chain]
        for step in range(4):
            gradients(parameters, step)
            run(optimizer, parameters)
            for scheduler in chained:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(1.0)
                else:
                    scheduler.step()
        rates.append([plain(g["lr"]) for g in optimizer.param_groups])
    return parameters, [float(r) for rs in rates for r in rs]


def autograd(info: Any, parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Trains with gradients of a loss, both forms of `zero_grad`, and hooks around steps."""
    optimizer = info.optim_cls(parameters, **settings)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = sum((p.sin() * p).sum() for p in parameters)
        loss.backward()
        run(optimizer, parameters)
        losses.append(loss.detach())
    return losses, parameters, len(called)


def differentiable(info: Any, parameters: list[torch.nn.Parameter], settings: dict[str, Any]) -> Any:
    """Returns gradients through steps, with respect to the initial parameters and gradients."""
    grads = [(p.detach() * 0.3 + 0.5).requires_grad_() for p in parameters]
    copies = [p.clone() for p in parameters]
    optimizer = info.optim_cls(copies, **settings)
    for _ in range(3):
        for p, g in zip(copies, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    loss = sum(p.sin().sum() for p in copies)
    return copies, torch.autograd.grad(loss, [*parameters, *grads], allow_unused=True)


WAYS = {
    "steps": steps,
    "complex": complex_parameters,
    "groups": groups,
    "closures": closures,
    "states": states,
    "schedulers": schedulers,
    "autograd": autograd,
    "differentiable": differentiable,
}
