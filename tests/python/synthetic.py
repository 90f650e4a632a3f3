"""Synthetic reports, timelines and graphs of a program that trains a residual network."""

import random
from typing import Any

from torch_tandem._report import page as pages
from torch_tandem._report.types import Block, Graphs, Loop, Node, Phase, Report, Step, Timeline
from typed import empty

MODEL, TRAIN = "/home/user/project/model.py", "/home/user/project/train.py"
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>&\"'`${x}{{data}}"


def file_of(frame: str) -> str:
    return "module.py" if "Module." in frame else "model.py" if "forward" in frame else "train.py"


class Tracer:
    """Collects nodes in the order in which a traced program would issue them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.edges: list[tuple[int, int]] = []
        self.stack: list[str] = ["<module>:90", "train:31"]

    def op(self, name: str, inputs: list[Any], out: str, after: list[int] | None = None, **more: Any) -> int:
        number = len(self.nodes) + 1
        before = [number - 1] if after is None and number > 1 else after or []
        self.edges += [(b, number) for b in before]
        file = MODEL if any("forward" in frame for frame in self.stack) else TRAIN
        frame = self.stack[-1]
        function, _, line = frame.rpartition(":")
        node: Node = {
            "id": number,
            "op": f"aten::{name}",
            "line": f"{file}:{line} in {function}",
            "stack": [f"{frame} {file_of(frame)}" for frame in self.stack],
            "backward": False,
            "out": [out],
            "inputs": [[i] if not isinstance(i, list) else i for i in inputs],
            "variants": 1,
            "fetched": False,
            "ends": False,
            "dynamic": False,
            "exec_us": 40 * (number % 50),
            "module": "ResNet.layers.*" if len(self.stack) > 3 else "",
        }
        self.nodes.append({**node, **more})
        return number

    def within(self, *frames: str) -> "Within":
        """Adds frames of modules."""
        return Within(self, list(frames))


class Within:
    def __init__(self, tracer: Tracer, frames: list[str]) -> None:
        self.tracer, self.frames = tracer, frames

    def __enter__(self) -> None:
        self.tracer.stack += self.frames

    def __exit__(self, *_: object) -> None:
        del self.tracer.stack[-len(self.frames) :]


def graphs(target: int = 300) -> Graphs:
    """Returns a graph of about `target` nodes: modules, a branch, nested loops, a fetch, backward, an
    optimizer.
    """
    t = Tracer()
    blocks_of_net = max((target - 60) // 40, 1)
    loops: list[Loop] = []
    shape = "float32[32,64,56,56]"
    x = t.op("_to_copy", ["feed"], "float32[32,3,224,224]", variants=2)
    convs: list[tuple[int, list[str]]] = []
    with t.within("ResNet.forward:266"):
        first_of_loop = len(t.nodes) + 1
        for number in range(blocks_of_net):
            with t.within("Sequential.forward:12"):
                shortcut = x
                for line in (146, 150, 154):
                    with t.within(f"Bottleneck.forward:{line}", "Conv2d.forward:554"):
                        x = t.op("convolution", [x, "state"], shape)
                        convs.append((x, list(t.stack)))
                    with t.within(f"Bottleneck.forward:{line + 1}", "BatchNorm2d.forward:190"):
                        x = t.op("native_batch_norm", [x, "state", "state"], shape, variants=1 + number % 3)
                    with t.within(f"Bottleneck.forward:{line + 2}"):
                        x = t.op("relu", [x], shape)
                with t.within("Bottleneck.forward:160"):
                    if number == 1:  # the shortcut is scaled in some iterations
                        scaled = t.op("mul.Tensor", [shortcut, "state"], shape)
                        x = t.op("add.Tensor", [x, [scaled, shortcut]], shape, after=[scaled, scaled - 1])
                    else:
                        x = t.op("add.Tensor", [x, shortcut], shape)
        loops.append(
            {
                "id": 0,
                "parent": None,
                "header": first_of_loop,
                "nodes": list(range(first_of_loop, len(t.nodes) + 1)),
                "unrolled": True,
            }
        )
        x = t.op("mean.dim", [x], "float32[32,64]")
        header = len(t.nodes) + 1
        with t.within("Decoder.forward:41"):  # a While with one inside, not unrolled
            x = t.op("lstm_cell", [[x, header + 4], "state"], "float32[32,64]")
            x = t.op("tanh", [x], "float32[32,64]")
            inner = t.op("matmul", [[x, x + 2], "state"], "float32[32,64]")
            x = t.op("softmax", [inner], "float32[32,64]")
            t.edges.append((x, inner))
            x = t.op("mul.Tensor", [x, inner], "float32[32,64]", dynamic=True)
            t.edges.append((x, header))
        loops += [
            {
                "id": 1,
                "parent": None,
                "header": header,
                "nodes": list(range(header, header + 5)),
                "unrolled": False,
            },
            {
                "id": 2,
                "parent": 1,
                "header": inner,
                "nodes": [inner, inner + 1],
                "unrolled": False,
            },
        ]
    t.stack[-1] = "train:33"
    loss = t.op("nll_loss_forward", [x, "feed"], "float32[]")
    t.stack[-1] = "train:35"
    t.op("_local_scalar_dense", [loss], "", fetched=True)
    gradient = t.op("fill_.Scalar", [loss], "float32[]")
    t.stack[-1] = "train:34"
    for made, stack in reversed(convs):
        t.stack = stack
        gradient = t.op("threshold_backward", [gradient, made], shape, backward=True)
        gradient = t.op("convolution_backward", [gradient, made, "state"], shape, backward=True)
    t.stack = ["<module>:90", "train:36", "Optimizer.step:484", "SGD.step:123"]
    while len(t.nodes) < target - 1:
        t.op("add_.Tensor", ["state", gradient], "float32[64,64,3,3]")
    t.op("add_.Tensor", ["state", gradient], "float32[64,64,3,3]", ends=True)
    return {"nodes": t.nodes, "edges": t.edges, "loops": loops, "blocks": blocks(t, loops), "entry": [0]}


def blocks(t: Tracer, loops: list[Loop]) -> list[Block]:
    """Returns the symbolic graph's blocks, which end at branches, joins, loops and fetches, and after 24
    nodes.
    """
    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for a, b in t.edges:
        after.setdefault(a, []).append(b)
        before.setdefault(b, []).append(a)
    loop_of = {n: loop["id"] for loop in loops if not loop["unrolled"] for n in loop["nodes"]}
    blocks: list[Block] = []
    block_of: dict[int, int] = {}
    for node in t.nodes:
        n = node["id"]
        old = blocks[-1]["nodes"] if blocks else []
        cut = (
            not old
            or len(before.get(n, [])) != 1
            or before[n] != [old[-1]]
            or len(after[old[-1]]) > 1
            or loop_of.get(n) != loop_of.get(old[-1])
            or t.nodes[old[-1] - 1]["fetched"]
            or len(old) >= 24
        )
        if cut:
            blocks.append({"id": len(blocks), "nodes": [], "next": [], "loop": loop_of.get(n), "ends": False})
        blocks[-1]["nodes"].append(n)
        blocks[-1]["ends"] = node["ends"]
        block_of[n] = blocks[-1]["id"]
    for block in blocks:
        block["next"] = [block_of[n] for n in after.get(block["nodes"][-1], [])]
    return blocks


def report(steps: int = 400, hostile: bool = False) -> Report:
    """Returns a report with long waits at one fetch and a few divergences."""
    rng = random.Random(0)
    rows: list[Step] = []
    clock = 3_000_000
    for number in range(1, steps + 1):
        tracing = number <= 3 or number in (40, 41, steps * 3 // 5)
        mixed = number == steps // 2
        python = rng.gauss(9000, 700) * (4 if tracing else 1)
        stall = 0 if tracing else max(rng.gauss(6200, 900), 0) + (12000 if number % 10 == 0 else 0)
        kernels = 0 if tracing else rng.uniform(0, 400)
        total = python + stall + kernels
        runner = 0 if tracing else total * rng.uniform(0.72, 0.85)
        rows.append(
            {
                "number": number,
                "start_us": int(clock),
                "python_exec_us": int(python),
                "python_stall_us": int(stall),
                "python_kernels_us": int(kernels),
                "runner_exec_us": int(runner),
                "runner_stall_us": int(total - runner),
                "ops": 612,
                "traced": 612 if tracing else 200 if mixed else 0,
                "divergences": int(mixed or number == 40),
            }
        )
        clock += total
    captured = sum(r["ops"] for r in rows)
    coexecuted = captured - sum(r["traced"] for r in rows)
    bad = HOSTILE if hostile else ""

    def total(name: str) -> int:
        return sum(r[name] for r in rows)

    half = steps // 2
    figures = {
        "steps_traced": sum(r["traced"] > 0 for r in rows),
        "steps_in_part": sum(0 < r["traced"] < r["ops"] for r in rows),
        "steps_unrecorded": 0,
        "steps_coexecuted": sum(r["traced"] == 0 for r in rows),
        "ops_captured": captured,
        "ops_coexecuted": coexecuted,
        "ops_after_5": captured - 5 * 612,
        "ops_coexecuted_after_5": coexecuted - 2 * 612,
        "ops_after_10": captured - 10 * 612,
        "ops_coexecuted_after_10": coexecuted - 7 * 612,
        "ops_other_threads": 120,
        "blocks_sent": 40 * steps,
        "median_block_ops": 24,
        "python_exec_us": total("python_exec_us"),
        "python_stall_us": total("python_stall_us"),
        "runner_exec_us": total("runner_exec_us"),
        "runner_stall_us": total("runner_stall_us"),
        "python_kernels_us": total("python_kernels_us"),
        "running": empty(Step, number=steps + 1),
        "overlap_us": int(total("runner_exec_us") * 0.6),
        "tracegraph_nodes": 640,
        "symbolic_blocks": 41,
        "paths": 4,
        "memory_peak": 2_400_000_000,
        "pool_peak": 2_500_000_000,
        "executor": "cpu",
        "notes": [f"the script names no device: its tensors were adopted{bad}"],
        "functions": [
            {
                "name": f"Decoder.generate{bad}",
                "replayed": 0,
                "ran": 24,
                "audits": 0,
                "graphs": 0,
                "saved_us": 0,
                "reason": f"the program reads a value: aten::item at {TRAIN}:52 in train{bad}",
                "failed": False,
            },
            {
                "name": "train_step",
                "replayed": 3_120,
                "ran": 80,
                "audits": 9,
                "graphs": 2,
                "saved_us": 12_400_000,
                "reason": None,
                "failed": False,
            },
        ],
        "divergences": [
            {
                "line": f"{TRAIN}:48 in train{bad}",
                "op": f"aten::clip_grad_norm_{bad}",
                "what": "operator",
                "expected": f"aten::add_.Tensor{bad}",
                "got": "aten::linalg_vector_norm",
                "reason": "expected aten::add_.Tensor at train.py:36, got aten::linalg_vector_norm",
                "count": 2,
                "cost_us": 81_300,
                "first": 40,
                "last": 41,
            },
            {
                "line": f"{MODEL}:160 in forward",
                "op": "aten::add.Tensor",
                "what": "input",
                "expected": "a tensor on the device",
                "got": "a host tensor",
                "reason": "input 0 is a host tensor, expected a tensor on the device",
                "count": 1,
                "cost_us": 35_900,
                "first": half,
                "last": half,
            },
        ],
        "fetches": [
            {
                "line": f"{TRAIN}:35 in train{bad}",
                "op": f"aten::_local_scalar_dense{bad}",
                "count": steps,
                "wait_us": int(total("python_stall_us") * 0.83),
                "kernels_us": int(total("python_kernels_us") * 0.5),
            },
            {
                "line": f"{TRAIN}:61 in evaluate",
                "op": "aten::eq.Tensor",
                "count": steps // 10,
                "wait_us": int(total("python_stall_us") * 0.12),
                "kernels_us": 0,
            },
        ],
        "feeds": [
            {
                "line": f"{TRAIN}:28 in train",
                "op": "aten::_to_copy",
                "kind": "host tensor",
                "count": steps,
                "bytes": steps * 19_267_584,
            },
            {
                "line": f"{TRAIN}:36 in train",
                "op": "aten::add_.Tensor",
                "kind": "number",
                "count": 161 * steps,
                "bytes": 1288 * steps,
            },
            {
                "line": f"{MODEL}:70 in forward",
                "op": f"aten::bernoulli_{bad}",
                "kind": "generator",
                "count": 2 * steps,
                "bytes": 0,
            },
        ],
        "machine": {"copy": 2e10, "matmul": 1e11},
        "kernels": [
            {
                "ops": ["aten::mul.Tensor", "aten::add.Tensor", "aten::gelu", "aten::sum"][: 1 + n % 4],
                "nodes": [n + k for k in range(1 + n % 4)],
                "lines": [f"{MODEL}:{n + k} in forward{bad}" for k in range(1 + n % 2)],
                "modules": [f"Decoder.layers.*.attention{bad}"] if n % 2 else [],
                "count": 10 * n,
                "exec_us": 1000 * n,
                "bytes": 15_000_000 * n,
                "flops": 30_000_000 * n,
            }
            for n in range(1, 13)
        ],
        "operators": [
            {
                "name": f"aten::{name}",
                "count": count * steps,
                "coexecuted": count * steps - 5,
                "exec_us": cost,
            }
            for name, count, cost in (
                ("convolution", 53, 2_010_000),
                ("convolution_backward", 53, 1_950_000),
                ("native_batch_norm", 53, 480_000),
                ("relu", 49, 160_000),
                ("threshold_backward", 49, 170_000),
                ("add.Tensor", 16, 62_000),
                ("add_.Tensor", 161, 130_000),
                ("lstm_cell", 11, 90_000),
                ("nll_loss_forward", 1, 900),
                ("mean.dim", 1, 2_100),
            )
        ],
        "phases": _phases(rows),
        "steps": rows[-2000:],
    }
    return empty(Report, **figures)


def _phases(rows: list[Step]) -> list[Phase]:
    phases: list[Phase] = []
    for row in rows:
        all_traced = row["traced"] == row["ops"]
        name = "tracing" if all_traced else "mixed" if row["traced"] else "co-execution"
        if not phases or phases[-1]["phase"] != name:
            phases.append({"from": row["number"], "to": 0, "phase": name, "ops": 0, "traced": 0})
        phases[-1]["to"] = row["number"]
        phases[-1]["ops"] += row["ops"]
        phases[-1]["traced"] += row["traced"]
    return phases


def timeline(data: Report, hostile: bool = False) -> Timeline:
    """Returns the newest iterations of a report as events."""
    rng = random.Random(1)
    python, runs, steps = [], [], []
    for row in data["steps"][-200:]:
        start, number = float(row["start_us"]), row["number"]
        end = start + row["python_exec_us"] + row["python_stall_us"] + row["python_kernels_us"]
        steps.append([number, start, end])
        if row["traced"]:
            python.append([start, end - start, "trace", number, f"{TRAIN}:31 in train"])
            continue
        wait = float(row["python_stall_us"])
        line = f"{TRAIN}:35 in train{HOSTILE if hostile else ''}"
        python.append([end - wait - 400, wait * 5 / 6, "fetch", number, line])
        python.append([end - wait / 6 - 300, wait / 6, "stall", number, ""])
        at = start + 300
        for block in range(24):
            length = max(row["runner_exec_us"] / 24 * rng.uniform(0.6, 1.3), 1.0)
            runs.append([at, length, "beside", block, 24, number])
            at += length + rng.randint(5, 160)
        runs.append([end - wait - 300, row["python_kernels_us"] / 2, "inline", 24, 24, number])
    return {"python": python, "runs": runs, "steps": steps, "dropped": 41_000}


def page(nodes: int = 300, hostile: bool = False) -> str:
    """Returns the page of the report, with a graph of about `nodes` nodes."""
    data, graph = report(hostile=hostile), graphs(nodes)
    if hostile:
        for node in graph["nodes"][::7]:
            node["op"] += HOSTILE
            node["line"] += HOSTILE
            node["stack"] = [frame + HOSTILE for frame in node["stack"]]
    return pages.html(data, timeline(data, hostile), graph)


def small_page(data: Report, nodes: int) -> str:
    """Returns a page without a timeline, whose graph has one node or none."""
    only = graphs(300)["nodes"][0]
    block = empty(Block, nodes=[1], ends=True)
    graph = empty(Graphs, nodes=[only], blocks=[block], entry=[0]) if nodes else empty(Graphs)
    return pages.html(data, empty(Timeline), graph)
