"""Statements that decide what runs next: branches, loops, exceptions, contexts, patterns."""

import contextlib

import torch
from helpers import coexecuting, data

STEPS = 18

# --- branches -----------------------------------------------------------------------------------


@coexecuting
def test_if_elif_else(device):
    for step in range(STEPS):
        x = data(4, seed=step % 6).to(device)
        if x.sum() > 1:
            y = x.exp()
        elif x.sum() > -1:
            y = x.sin()
        else:
            y = x * 2
        yield y + 1


@coexecuting
def test_branches_in_every_combination(device):
    """The program takes each branch early. Its last iterations take the branches in new combinations."""
    x = data(4).to(device)
    for step in range(40):
        bits = step if step < 4 else 1 << step % 4 if step < 34 else [3, 7, 13, 11, 15, 14][step - 34]
        if bits & 1:
            x = x.sin()
        x = x + 0.5
        if bits & 2:
            x = x * 2
        x = x - 0.5
        if bits & 4:
            x = x.tanh()
        x = x * 0.9
        if bits & 8:
            x = x.cos()
        x = x * 1.1
        yield x


@coexecuting
def test_nested_if(device):
    x = data(4).to(device)
    for step in range(STEPS):
        if step % 2:
            x = x.sin()
            if step % 3:
                x = x * 2
        elif step % 3:
            x = x.cos()
        else:
            pass
        x = x + 0.1
        yield x


@coexecuting
def test_conditional_expression(device):
    x = data(4).to(device)
    for _ in range(STEPS):
        x = x.mul(-0.9) if x.sum() > 0 else x.neg() + 0.1
        y = (x.exp() if x[0] > 0 else x.tanh()) * (2 if x[1] > 0 else 3)
        yield x, y


@coexecuting
def test_and_or_not(device):
    for step in range(STEPS):
        a, b = data(2, seed=step % 6).to(device)
        both, either = a > 0 and b > 0, a > 0 or (a + b).exp() > 1
        chosen = not b > 0 and a * 2
        yield both, either, chosen, a.clone() if both and not chosen else b.sin()


@coexecuting
def test_chained_comparison(device):
    for step in range(STEPS):
        x = data(4, seed=step % 6).to(device)
        low, value, high = -x.abs().mean(), x.sum(), x.abs().mean()
        yield x.sin() if low < value < high else x.cos(), low <= high != value


@coexecuting
def test_any_and_all_stop_early(device):
    for step in range(STEPS):
        rows = [data(3, seed=step % 3 + k).to(device) for k in range(4)]
        yield any(row.sum() > 0.5 for row in rows), all((row * 2).max() > 0 for row in rows)


# --- loops --------------------------------------------------------------------------------------


@coexecuting
def test_for_over_range(device):
    x = data(4).to(device)
    for step in range(STEPS):
        for k in range(step % 4):
            x = (x + k).sin()
        yield x * 2


@coexecuting
def test_for_over_range_with_counts_never_seen_before(device):
    x = data(4).to(device)
    for step in range(STEPS):
        for _ in range(step + 1):
            x = x.sin() + 0.1
        yield x * 2


@coexecuting
def test_for_over_a_tensor_and_its_number(device):
    for step in range(STEPS):
        x = data(2 + step % 3, 4, seed=step).to(device)
        total = torch.zeros(4, device=device)
        for row in x:
            total = total * 0.5 + row
        for _ in range(x.argmax() % 4):
            total = total.tanh()
        yield total


@coexecuting
def test_for_over_a_list_that_grows(device):
    pending = [data(4).to(device)]
    for step in range(STEPS):
        out = []
        for x in pending:
            out.append(x.sin())
            if len(pending) <= step % 3:
                pending.append(x * 0.5)
        yield out


@coexecuting
def test_for_over_zip_enumerate_reversed_and_dict(device):
    table = {name: data(3, seed=k).to(device) for k, name in enumerate("abc")}
    for step in range(STEPS):
        for k, (x, y) in enumerate(zip(table.values(), reversed(table.values()), strict=True)):
            x.mul_(0.9).add_(y, alpha=k / 10)
        for name, x in sorted(table.items(), reverse=step % 2 == 0):
            table[name] = x + ord(name) / 100
        yield dict(table)


@coexecuting
def test_while_on_a_value(device):
    for step in range(STEPS):
        x = data(4, seed=step).to(device) * (1 + step)
        while x.norm() > 1:
            x = x * 0.5
        yield x + 1


@coexecuting
def test_while_true_and_break(device):
    for step in range(STEPS):
        x, count = data(4, seed=step % 6).to(device), 0
        while True:
            x = x.sin()
            count += 1
            if x.abs().max() < 0.7 or count > 5:
                break
            x = x * 0.9
        yield x, count


@coexecuting
def test_continue(device):
    for step in range(STEPS):
        total = torch.zeros(3, device=device)
        for k in range(6):
            if (k + step) % 3 == 0:
                continue
            x = data(3, seed=k).to(device)
            if x.sum() > 0:
                total = total + x
                continue
            total = total * 0.5 - x
        yield total


@coexecuting
def test_else_of_loops(device):
    x = data(4).to(device)
    for step in range(STEPS):
        for k in range(3):
            x = x + 0.1
            if k == step % 5:
                break
        else:
            x = x.sin()
        count = step % 3
        while count:
            count -= 1
            x = x * 0.9
            if step % 2:
                break
        else:
            x = x.cos()
        yield x


@coexecuting
def test_nested_loops(device):
    for step in range(STEPS):
        x = data(3, seed=step).to(device)
        for i in range(1 + step % 3):
            for j in range(i, 3):
                x = x + i * j
                if step % 2 and j == 1:
                    break
                x = x.sin()
            x = x * 2
        yield x


@coexecuting
def test_loop_with_a_branch_in_its_body(device):
    """The branches of a round are known, but each iteration takes them in a new order."""
    for step in range(30):
        x = data(4, seed=step).to(device)
        for k in range(6):
            x = x.sin() if (step * 37 >> k) & 1 else x * 1.1 + 0.1
        yield x


@coexecuting
def test_iter_with_a_sentinel(device):
    for step in range(STEPS):
        numbers = iter([*range(1 + step % 3), None, 7])
        x = data(3).to(device)
        for k in iter(numbers.__next__, None):
            x = x.cos() + k
        yield x, next(numbers)


@coexecuting
def test_state_machine(device):
    def start(x):
        return x + 0.5, middle

    def middle(x):
        return x * 0.8, (middle if x.sum() > 1 else end)

    def end(x):
        return x.sin(), None

    for step in range(STEPS):
        x, state = data(4, seed=step % 6).to(device), start
        while state:
            x, state = state(x)
        yield x


# --- returns ------------------------------------------------------------------------------------


def clipped(x, limit):
    if x.abs().max() < limit:
        return x
    y = x / x.abs().max()
    for k in range(4):
        if y[k] > 0.9:
            return y * limit
    y = y * 0.5
    return (y.neg(),)


@coexecuting
def test_early_return(device):
    for step in range(STEPS):
        yield clipped(data(4, seed=step % 6).to(device), 1 + step % 2)


@coexecuting
def test_return_and_break_in_finally(device):
    log = []

    def last_word(x, k):
        try:
            if k == 2:
                return x.exp()
            x = x.sin()
        finally:
            log.append(k)
            x = x + 1
            x.sum()
        return x

    for step in range(STEPS):
        x = data(3).to(device)
        for k in range(step % 4):
            try:
                x = last_word(x, k)
                if k == 2:
                    break
            finally:
                x = x * 0.5
        yield x, len(log)


# --- exceptions ---------------------------------------------------------------------------------


class Odd(ValueError):
    def __init__(self, x):
        super().__init__("odd")
        self.x = x * 3


@coexecuting
def test_try_except_else_finally(device):
    def risky(x, step):
        y = x.sin()
        if step % 3 == 1:
            raise Odd(y)
        return y

    for step in range(STEPS):
        x = data(3, seed=step).to(device)
        try:
            y = risky(x, step)
        except Odd as error:
            y = error.x
        else:
            y = y.exp()
        finally:
            x = x * 2
        yield x + y


@coexecuting
def test_nested_exceptions(device):
    def inner(x, step):
        try:
            x = x * 2
            if step % 2:
                raise KeyError("a")
            return x.sin()
        except KeyError as error:
            x = x + 1
            if step % 3 == 0:
                raise RuntimeError("b") from error
            raise
        finally:
            x.mul_(0.5)

    for step in range(STEPS):
        x, said = data(3, seed=step).to(device), []
        try:
            x = inner(x, step)
        except (KeyError, RuntimeError) as error:
            said = [repr(error), repr(error.__cause__)]
            x = x.cos() if error.__cause__ else x.tanh()
        yield x, said


@coexecuting
def test_exception_groups(device):
    for step in range(STEPS):
        x = data(3, seed=step).to(device)
        try:
            raise ExceptionGroup("several", [Odd(x), *([KeyError(1)] if step % 2 else [])])
        except* KeyError:
            x = x.sin()
        except* ValueError as group:
            x = x + group.exceptions[0].x
        yield x


@coexecuting
def test_operator_that_raises_where_a_value_says_so(device):
    for step in range(STEPS):
        x = data(3, seed=step % 6).to(device)
        try:
            y = x.sin() + x[: 2 if x.sum() > 0 else 3]
        except RuntimeError as error:
            y, said = x * 2, str(error)
        else:
            said = ""
        yield y, said


@coexecuting
def test_exception_out_of_a_deep_recursion(device):
    def sink(x, depth):
        if depth == 0:
            raise Odd(x)
        try:
            return sink(x + 1, depth - 1)
        finally:
            x.mul_(2)

    for step in range(STEPS):
        x = data(3).to(device)
        try:
            sink(x, 1 + step % 4)
        except Odd as error:
            yield x + error.x


@coexecuting
def test_recursion_error(device):
    def endless(x, depth=0):
        return endless(x + 1 if depth < 3 else x, depth + 1)

    for _ in range(STEPS):
        x = data(3).to(device)
        try:
            endless(x)
        except RecursionError:
            x = x.sin()
        yield x


@coexecuting
def test_assert(device):
    for step in range(STEPS):
        x = data(3, seed=step % 6).to(device)
        try:
            assert x.mean() > 0, "negative"
            y = x.sin()
        except AssertionError as error:
            y = x.cos() + str(error).count("negative")
        yield y


# --- contexts -----------------------------------------------------------------------------------


class Scaled:
    def __init__(self, x, by):
        self.x, self.by = x, by

    def __enter__(self):
        self.x.mul_(self.by)
        return self.x

    def __exit__(self, kind, value, trace):
        self.x.div_(self.by)
        return kind is KeyError


@coexecuting
def test_context_managers(device):
    x = data(4).to(device)
    for step in range(STEPS):
        with Scaled(x, 2) as y, Scaled(y, 3):
            z = y.sin()
            if step % 3 == 0:
                raise KeyError
            z = z * 2
        yield x.clone(), z


@coexecuting
def test_contextlib(device):
    @contextlib.contextmanager
    def shifted(x, by):
        x.add_(by)
        try:
            yield x.sum()
        except ValueError:
            x.zero_()
        finally:
            x.sub_(by)

    for step in range(STEPS):
        x = data(4, seed=step).to(device)
        with contextlib.ExitStack() as stack:
            sums = [stack.enter_context(shifted(x, k)) for k in range(step % 3)]
            stack.callback(x.mul_, 2)
            stack.enter_context(torch.no_grad() if step % 2 else contextlib.nullcontext())
        with contextlib.suppress(ValueError), shifted(x, 1) as total:
            if step % 2:
                raise ValueError
            x = x + total
        yield x, sums


# --- patterns and assignments -------------------------------------------------------------------


class Point:
    __match_args__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


@coexecuting
def test_match(device):
    def meaning(thing):
        match thing:
            case torch.Tensor(ndim=2):
                return thing.sum(0)
            case Point(x, y) if x.sum() > y.sum():
                return x - y
            case Point(x=x):
                return x * 2
            case [first, *rest]:
                return first.sin() + len(rest)
            case {"x": x, **rest}:
                return x.cos() + len(rest)
            case None | 0:
                return torch.ones(3, device=device)
            case _:
                return torch.zeros(3, device=device) + thing

    for step in range(2 * STEPS):
        x, y = data(2, 3, seed=step % 6).to(device)
        things = [torch.stack([x, y]), Point(x, y), [x, y], {"x": x, "y": y}, None, 0, 7]
        yield meaning(things[step % 7]) + meaning(Point(y, x))


@coexecuting
def test_walrus(device):
    for step in range(STEPS):
        x = data(4, seed=step % 6).to(device)
        if (total := x.sum()) > 0:
            x = x / total
        kept = [y for k in range(4) if (y := x[k] * 2) > 0.1]
        yield total, kept, (last := x.cos()) + last


@coexecuting
def test_assignments(device):
    x = data(4, 3).to(device)
    for step in range(STEPS):
        first, *middle, last = x.unbind()
        (a, b), c = x[:2].cos(), x[3]
        a, b = b, a
        d = e = c * step
        d += 1
        x[step % 4], x[0] = a, last.clone()
        x[1:3] *= 0.5
        e = e - len(middle) * first
        del first, middle
        yield x.clone(), a - b, d, e
