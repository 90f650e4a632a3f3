"""The report, the timeline and the graphs as plain data.

`CoreReport`, `Timeline` and `Graphs` have exactly the keys of the Rust types in `pybridge/src/report.rs`,
`timeline.rs` and `graphs.rs`. `Device` and `Adapter` have the keys of `DeviceReport` and `Listing` in the
crate `kernels`. `tests/python/test_report.py` compares all of them with the data of programs.

A value whose name ends in `_us` is in microseconds. A tuple type stands for a list of this length. A line is
a text such as `file.py:12 in train`.
"""

from typing import Literal, TypedDict

Mode = Literal["coexec", "lazy", "trace"]
What = Literal["operator", "attribute", "input", "device", "modes", "dataflow", "branch", "end", "location"]


class Divergence(TypedDict):
    """Divergences at one line with the same operator and the same difference."""

    line: str
    op: str
    what: What
    expected: str
    got: str
    reason: str  # the difference in one sentence
    count: int
    cost_us: int  # time until co-execution resumed
    first: int  # iteration
    last: int  # iteration


class Fetch(TypedDict):
    """Fetches at one location."""

    line: str
    op: str
    count: int
    wait_us: int
    kernels_us: int  # time in which Python's thread executed runs for these fetches


class Feed(TypedDict):
    """Feeds of one kind at one location."""

    line: str
    op: str
    kind: Literal["host tensor", "number", "generator"]
    count: int
    bytes: int


class Collective(TypedDict):
    """Collectives of one operator of torch.distributed at one line."""

    op: str
    line: str
    count: int
    bytes: int  # bytes that this rank sent
    took_us: int  # sum of the times from start to end
    waited_us: int  # time in which the executor waited for the collectives


class Operator(TypedDict):
    """Counters of one operator."""

    name: str
    count: int
    coexecuted: int
    exec_us: int


class Kernel(TypedDict):
    """A kernel, with totals over all its launches."""

    ops: list[str]
    nodes: list[int]  # ids of nodes of the TraceGraph
    lines: list[str]
    modules: list[str]  # such as Encoder.layers.*.attention
    count: int
    exec_us: int
    bytes: int  # minimum of the bytes that are read and written
    flops: int


Phase = TypedDict(
    "Phase",
    {
        "from": int,
        "to": int,
        "phase": Literal["tracing", "co-execution", "mixed", "imperative"],
        "ops": int,
        "traced": int,
    },
)
"""Consecutive iterations that ran in the same way."""


class Step(TypedDict):
    """One iteration. The times of each runner add up to the time of the iteration."""

    number: int
    start_us: int
    python_exec_us: int  # running the program
    python_stall_us: int  # waiting
    python_kernels_us: int  # executing runs on Python's thread
    runner_exec_us: int
    runner_stall_us: int
    ops: int
    traced: int
    divergences: int


class Region(TypedDict):
    """The place of a region. Times are per operator, and None for a place that was not tried."""

    line: str | None  # None for the region outside of long loops
    place: Literal["beside", "inline"]
    beside_ns: float | None
    inline_ns: float | None


class Function(TypedDict):
    """Counters of a `torch_tandem.function`."""

    name: str
    replayed: int
    ran: int  # calls that ran in Python, audits included
    audits: int
    graphs: int
    saved_us: int  # time that Python would have taken for the replayed calls
    reason: str | None  # why the latest kind of call is not replayed
    failed: bool  # whether an audit has found a difference, so that all calls run in Python


class Device(TypedDict):
    """Counters of one GPU. Memory is in bytes."""

    name: str
    native_ops: int
    host_ops: dict[str, int]
    dispatches: int
    submissions: int
    pipelines: int
    memory_live_peak: int
    memory_peak: int  # caches included


class CoreReport(TypedDict):
    """The counters of the engine and the executor."""

    mode: Mode
    steps_traced: int
    steps_in_part: int
    steps_unrecorded: int
    steps_coexecuted: int
    ops_captured: int
    ops_coexecuted: int
    ops_after_5: int
    ops_coexecuted_after_5: int
    ops_after_10: int
    ops_coexecuted_after_10: int
    ops_unrecorded: int
    ops_other_threads: int
    ops_on_host: int
    blocks_sent: int
    median_block_ops: int
    divergences: list[Divergence]
    fetches: list[Fetch]
    feeds: list[Feed]
    operators: list[Operator]
    kernels: list[Kernel]
    phases: list[Phase]
    steps: list[Step]
    running: Step  # the current iteration, which has not ended
    python_exec_us: int
    python_stall_us: int
    python_kernels_us: int
    runner_exec_us: int
    runner_stall_us: int
    overlap_us: int
    tracegraph_nodes: int
    tracegraph_bytes: int
    symbolic_blocks: int
    paths: int
    regions: list[Region]
    device: Device | None  # the sum of `devices`
    devices: list[Device]
    host_ops: dict[str, int]
    memory_peak: int
    pool_peak: int
    executor: Literal["cpu", "gpu", "none"]
    notes: list[str]


class Model(TypedDict):
    """A model that is not on the device."""

    what: str
    line: str
    library: str  # the installed package whose code ran the model, or ""
    device: str
    parameters: int


class Candidate(TypedDict):
    """A class of modules whose calls could be replayed, with the time of the calls in a few iterations."""

    name: str  # in the form of `tandem run --function`
    calls: int
    us: int
    share: float  # share of the time of these iterations


class Machine(TypedDict):
    """Peak rates of this machine, per second."""

    copy: float  # bytes, read and written
    matmul: float  # arithmetic operations


class Report(CoreReport):
    """The report: the counters of the core, and Python's additions."""

    functions: list[Function]
    models_elsewhere: list[Model]
    candidates: list[Candidate]
    collectives: list[Collective]
    iteration_ends: str  # what ends most iterations, such as `optimizer.step()`; "" if nothing has
    device_alias: bool  # whether "cuda" means Tandem
    machine: Machine | None  # None unless kernels of the cpu executor were measured


class MemorySnapshot(TypedDict):
    """Live storages and their history. A storage has a device, an address, bytes, and a stack's index."""

    stacks: list[list[tuple[str, int, str]]]
    live: list[tuple[int, int, int, int]]
    changes: list[tuple[bool, tuple[int, int, int, int], int]]


class Timeline(TypedDict):
    """The newest recorded events. Times are in microseconds."""

    python: list[tuple[float, float, Literal["fetch", "stall", "kernels", "trace"], int, str]]
    """Activities of PythonRunner: start, duration, kind, iteration, line."""
    runs: list[tuple[float, float, Literal["beside", "inline"], int, int, int]]
    """Runs: start, duration, place (GraphRunner's thread or Python's), first block, operators, iteration."""
    steps: list[tuple[int, float, float]]
    """Iterations: number, start, end."""
    dropped: int


class Node(TypedDict):
    """A node of the TraceGraph. A source of an input is a node's id or a name, such as `feed`."""

    id: int
    op: str
    line: str
    module: str  # such as Encoder.layers.*.attention; empty if no module issues the operator
    stack: list[str]  # outermost first, such as train:31 main.py
    backward: bool
    out: list[str]
    inputs: list[list[int | str]]
    variants: int
    fetched: bool
    ends: bool
    dynamic: bool
    exec_us: int  # nodes that one kernel computes share its time


class Loop(TypedDict):
    """A loop of the TraceGraph."""

    id: int
    parent: int | None
    header: int
    nodes: list[int]
    unrolled: bool


class Block(TypedDict):
    """A block of the symbolic graph."""

    id: int
    nodes: list[int]
    next: list[int]
    loop: int | None
    ends: bool


class Graphs(TypedDict):
    """The TraceGraph (nodes, edges, loops) and the symbolic graph (blocks, entry)."""

    nodes: list[Node]
    edges: list[tuple[int, int]]
    loops: list[Loop]
    blocks: list[Block]
    entry: list[int]


class Adapter(TypedDict):
    """A graphics adapter that Tandem can run on."""

    index: int
    name: str
    backend: str
    kind: Literal["discrete", "integrated", "virtual", "software", "other"]
    driver: str
    features: list[str]
    max_binding: int  # bytes
