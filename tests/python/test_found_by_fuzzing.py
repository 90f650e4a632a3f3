"""Shrunk programs that the fuzzer (tests/fuzz) has found."""

import pytest
import torch
import torch_tandem
from helpers import check, data


def test_foreach_writes_what_autograd_has_saved():
    def program(device):
        for _ in range(8):
            w = data(4).to(device).requires_grad_()
            a = data(4, seed=1).to(device)
            y = (w * a).sum()
            torch._foreach_add_([a], 1.0)
            try:
                y.backward()
            except RuntimeError as error:
                yield str(error)[:40]
            else:
                yield w.grad

    check(program, coexecuted=0)


def test_backward_after_a_step_that_changed_the_parameters():
    def program(device):
        a, b = (data(4, 4, seed=i).to(device).requires_grad_() for i in range(2))
        optimizer = torch.optim.SGD([a, b], 0.1, foreach=True)
        for _ in range(8):
            loss = (a @ b).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            raised = None
            try:
                loss.backward()
            except RuntimeError as error:
                raised = type(error).__name__
            yield raised, a.detach().clone()

    check(program, coexecuted=0)


def test_foreach_writes_a_tensor_of_inference_mode():
    def program(device):
        for _ in range(8):
            with torch.inference_mode():
                x = data(4).to(device)
            try:
                torch._foreach_add_([x], 1.0)
            except RuntimeError as error:
                yield type(error).__name__
            else:
                yield "written"

    check(program, coexecuted=0)


def test_failure_that_was_seen_is_not_raised_again():
    x = data(4, 4).to("tandem")
    index = torch.arange(4).to("tandem")
    for step in range(8):
        try:
            x.index_select(0, index + step % 4).sum().item()
        except IndexError:
            assert step % 4
        torch_tandem.mark_step()
        torch_tandem.synchronize()


def test_write_from_memory_that_overlaps_raises_at_the_write():
    def program(device):
        x = data(4, 4).to(device)
        other = data(4, 4, seed=1).to(device)
        for step in range(12):
            source = x if step % 4 == 3 else other
            try:
                x[1:].copy_(source[:-1])
            except RuntimeError:
                x[1:] = source[:-1].clone()
            yield x.clone()

    check(program, coexecuted=0)


def test_resizing_to_the_same_sizes_keeps_strides():
    def program(device):
        for n in range(8):
            x = data(8, 4).to(device)[::2][: n % 3 + 1]
            yield x.resize_(2, 4).stride(), x.clone()

    check(program, coexecuted=0)


def test_foreach_that_raises_has_written_as_eager_has():
    def program(device):
        for _ in range(8):
            first = data(4).to(device)
            with torch.inference_mode():
                second = data(4, seed=1).to(device)
            try:
                torch._foreach_mul_([first, second], 2.0)
            except RuntimeError:
                yield first.clone(), second.clone()

    check(program, coexecuted=0)


def test_outputs_that_a_refused_call_resized_keep_their_sizes():
    def program(device):
        x, out, spread = (
            torch.ones(4, device=device),
            torch.empty(0, device=device),
            torch.ones(2, 3, device=device),
        )
        seen = []
        for to in (out, spread.t()):
            with pytest.raises(RuntimeError, match="alpha"):
                torch.sub(x, x, alpha=True, out=to)
            seen += [to.shape, to.stride(), to.untyped_storage().nbytes(), to.fill_(3).sum().item()]
        return [*seen, spread.shape]

    with pytest.warns(UserWarning, match="resized"):
        expected = program("cpu")
    for _ in range(4):
        with pytest.warns(UserWarning, match="resized"):
            assert program("tandem") == expected
        torch_tandem.mark_step()


def test_copies_to_the_host_keep_strides_of_dimensions_of_size_one():
    def program(device):
        x = data(3, 4).to(device)
        for _ in range(6):
            for t in (x[:1][::2], x.t()[:1], x[:, :1], x[:0][::2]):
                copies = t.to("cpu", copy=True), t.to("cpu", torch.float64)
                yield [(copy.stride(), copy) for copy in copies]

    check(program, coexecuted=0)


def test_foreach_writes_all_tensors_where_data_is_of_inference_mode():
    def program(device):
        for _ in range(8):
            first, second = data(4).to(device), data(4, seed=1).to(device)
            with torch.inference_mode():
                first.data = first.detach().clone()
            with torch.no_grad():
                torch._foreach_mul_([first, second, first], 2.0)
            yield first.clone(), second.clone(), first._version

    check(program, coexecuted=0)
