"""Ends of iterations that the program does not mark, and the changes to the user's modules by which Tandem
finds them.

An iteration ends at `optimizer.step()` or, in a program without such a call, at the outermost module call
without gradients. A process decides once which of the two applies, so each program here runs in a new
process.
"""

import json
import textwrap

import forked

SETUP = """
import json, threading
import torch, torch_tandem
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Dropout(0.1)), nn.Linear(8, 2))
model.to("tandem")
x = torch.ones(3, 4, device="tandem")
"""


def run(code):
    """Returns the JSON that a program's last line prints, parsed."""
    code = SETUP + textwrap.dedent(code)
    result = forked.run(["-c", code])
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_optimizer_steps():
    seen = run("""
        optimizer = torch.optim.Adam(model.parameters())
        torch_tandem.reset_report()
        for _ in range(20):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        print(json.dumps(torch_tandem.report()))
    """)
    assert seen["steps_traced"] + seen["steps_coexecuted"] == 20
    assert seen["steps_traced"] <= 3


def test_calls_without_gradients():
    seen = run("""
        model.eval()
        torch_tandem.mark_step()
        torch_tandem.reset_report()
        with torch.no_grad():
            for _ in range(20):
                out = model(x).softmax(1)
        print(json.dumps(torch_tandem.report()))
    """)
    # The iteration of the last softmax has not ended.
    assert seen["steps_traced"] + seen["steps_coexecuted"] == 20
    assert seen["steps_traced"] <= 3


def test_an_inner_call_ends_nothing():
    seen = run("""
        class Outer(nn.Module):
            def forward(self, x):
                return sum(model(x * k) for k in range(5))

        torch_tandem.mark_step()
        torch_tandem.reset_report()
        with torch.inference_mode():
            for _ in range(20):
                Outer()(x)
        print(json.dumps(torch_tandem.report()))
    """)
    assert seen["steps_traced"] + seen["steps_coexecuted"] == 20


def test_a_module_call_that_raises():
    seen = run("""
        torch_tandem.mark_step()
        torch_tandem.reset_report()
        with torch.no_grad():
            for step in range(20):
                try:
                    model(x if step % 4 else x.t())
                except RuntimeError:
                    pass
        print(json.dumps(torch_tandem.report()))
    """)
    assert 15 <= seen["steps_traced"] + seen["steps_coexecuted"] <= 20
    assert seen["steps_traced"] <= 6


def test_modules_are_left_as_they_were():
    seen = run("""
        import copy, io, pickle
        from torch.nn.modules import module as globals_of

        def state(module):
            return {k: repr(v) for m in module.modules() for k, v in vars(m).items() if "parameters" not in k}

        fresh = nn.Linear(4, 2)
        keys, before = sorted(vars(fresh)), state(model)
        names = [k for k in vars(globals_of) if k.startswith("_global") and k.endswith("_hooks")]
        hooks = {k: len(getattr(globals_of, k)) for k in names}
        model.eval()
        with torch.no_grad():
            expected = model(x)
            fresh(torch.ones(1, 4))
        same = [
            state(model).keys() == before.keys(),
            sorted(vars(fresh)) == keys,
            not any("hook" in k and v for m in model.modules() for k, v in vars(m).items()),
            hooks == {k: len(getattr(globals_of, k)) for k in names},
        ]
        with torch.no_grad():
            for clone in (
                copy.deepcopy(model),
                pickle.loads(pickle.dumps(model)),
                torch.jit.script(model),
                torch.jit.trace(model, x),
                torch.fx.symbolic_trace(model),
                torch.jit.load(io.BytesIO(torch.jit.script(model).save_to_buffer())),
            ):
                same.append(torch.equal(clone(x).cpu(), expected.cpu()))
        same.append(torch.equal(torch.jit.script(fresh)(torch.ones(1, 4)), fresh(torch.ones(1, 4))))
        print(json.dumps(same))
    """)
    assert seen == [True] * len(seen), seen


def test_modules_after_training_are_left_as_they_were():
    seen = run("""
        import pickle
        call = nn.Module.__call__
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            expected = model(x)
            clones = torch.jit.script(model), pickle.loads(pickle.dumps(model))
            same = [torch.equal(clone(x), expected) for clone in clones]
        pickle.loads(pickle.dumps(optimizer)).step()
        same.append(nn.Module.__call__ is call)
        same.append(not optimizer._optimizer_step_post_hooks)
        print(json.dumps(same))
    """)
    assert seen == [True] * len(seen), seen
