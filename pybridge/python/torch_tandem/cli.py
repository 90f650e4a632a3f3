"""The command `tandem`."""

import argparse
import contextlib
import json
import os
import re
import sys

from torch_tandem._command import interrupt
from torch_tandem._program import scripts, tracebacks
from torch_tandem._report.types import Report
from torch_tandem._startup import deferral, environment

USAGE = "tandem run [options] (script.py | -m module) [arguments of the script]"
GRAPHS = (".dot", ".svg", ".txt")
"""Suffixes of the files in which the symbolic graph can be stored."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    commands = {
        "autoload": _autoload,
        "compare": _compare,
        "devices": _devices,
        "launch": _launch,
        "run": _run,
    }
    try:
        return commands[options.command](options)
    except KeyboardInterrupt:  # the interrupt of a script has been shown
        interrupt.end()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Imperative-symbolic co-execution for PyTorch."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("devices", help="list the adapters that TANDEM_DEVICE can name")
    run = commands.add_parser("run", usage=USAGE, help="run an unchanged script", description=_run.__doc__)
    run.add_argument("--quiet", action="store_true", help="leave out the summary at the end")
    run.add_argument(
        "--verbose", action="store_true", help="add to the summary what is of use to work on Tandem itself"
    )
    run.add_argument(
        "--mode",
        choices=("coexec", "lazy", "trace"),
        help="co-execute (the default); lazy, which runs nothing before a value is needed; or only trace, "
        "which runs every operator at once",
    )
    run.add_argument(
        "--device-alias",
        action=argparse.BooleanOptionalAction,
        default=True,
        help='whether "cuda" means Tandem (the default)',
    )
    run.add_argument("--no-cuda", dest="device_alias", action="store_false", help="as --no-device-alias")
    run.add_argument(
        "--adopt",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether tensors are made on Tandem where the script names no device; auto (the default): "
        "if the script's text names none anywhere",
    )
    run.add_argument(
        "--function",
        action="append",
        default=[],
        metavar="NAME",
        help="replay equal calls of a function, of a class of modules, or of the module in a variable, "
        "without Python: step, Net or model in the script, module:name in another file. May be given "
        "several times (docs/functions.md)",
    )
    run.add_argument(
        "--compile",
        action="store_true",
        help="let the script's torch.compile make functions of its graphs, which are replayed without "
        "Python; without this option it is passed through",
    )
    run.add_argument(
        "--report", metavar="FILE", type=_writable, help="write the report to FILE as a page (HTML)"
    )
    run.add_argument("--report-json", metavar="FILE", type=_writable, help="write the report to FILE as JSON")
    run.add_argument(
        "--trace", metavar="FILE", type=_writable, help="write the timeline to FILE, for ui.perfetto.dev"
    )
    run.add_argument(
        "--graph",
        metavar="FILE",
        type=_graph_file,
        help="write the symbolic graph to FILE (.txt, .dot or .svg)",
    )
    launch = commands.add_parser(
        "launch",
        usage="tandem launch [-n PROCESSES] [--report FILE] [options of torchrun --] [options of tandem run] "
        "(script.py | -m module) [arguments of the script]",
        help="run an unchanged script in several processes, by torchrun",
        description=_launch.__doc__,
    )
    launch.add_argument(
        "-n",
        dest="processes",
        type=_processes,
        default="1",
        metavar="PROCESSES",
        help="number of processes of this machine (1)",
    )
    launch.add_argument(
        "--report",
        metavar="FILE",
        type=_writable,
        help="write the reports of this machine's processes to FILE as one page (HTML)",
    )
    compare = commands.add_parser(
        "compare", usage=USAGE.replace("run", "compare"), help=_compare.__doc__, description=_compare.__doc__
    )
    compare.add_argument(
        "--steps", type=int, default=400, metavar="N", help="maximum number of iterations of each side (400)"
    )
    compare.add_argument(
        "--report",
        metavar="FILE",
        type=_writable,
        help="write the report to FILE as a page (HTML), with the speed beside eager's",
    )
    for command in (run, compare):
        command.add_argument(
            "-m",
            dest="module",
            metavar="MODULE",
            nargs=argparse.REMAINDER,
            help="run a module, as python -m does; all that follows goes to it",
        )
        command.add_argument("script", nargs="?", help="the script")
        command.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    autoload = commands.add_parser(
        "autoload",
        help="let `import torch` register the device in this environment",
        description=_autoload.__doc__,
    )
    autoload.add_argument("state", nargs="?", choices=("on", "off", "status"), default="status")
    # Options of torchrun are unknown here, and may follow the options of `tandem launch`.
    end = _end_of_launch(argv) if argv[:1] == ["launch"] else len(argv)
    options, unknown = parser.parse_known_args(argv[:end])
    options.error = commands.choices[options.command].error
    if unknown:
        options.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.rest = argv[end:]
    if options.command not in ("run", "compare"):
        return options
    if options.module is None and options.script is None:
        options.error("a script is missing")
    if options.module == []:
        options.error("argument -m: a module is missing")
    return options


def _end_of_launch(argv: list[str]) -> int:
    """Return the number of arguments up to the last leading option of `tandem launch` itself."""
    end = 1
    while end < len(argv) and re.fullmatch(r"-n\d*|--report(=.*)?|-h|--help", argv[end]):
        end += 2 if argv[end] in ("-n", "--report") else 1
    return end


def _compare(options: argparse.Namespace) -> int:
    """Run a script in eager PyTorch and on Tandem in turn, and compare speed, losses and memory."""
    from torch_tandem._command import compare

    if options.steps < compare.FEWEST:
        options.error(f"argument --steps: {compare.FEWEST} iterations are the minimum")
    if options.script == "-":
        options.error("standard input can be read only once, but the script runs twice: write it to a file")
    _find(options)
    _check_device(options)
    kind, name, args = "script", options.script, options.args
    if options.module is not None:
        kind, (name, *args) = "module", options.module
    return compare.compare([kind, name, *args], options.steps, options.report)


def _find(options: argparse.Namespace) -> tuple[scripts.Script, list[str]]:
    """Return the script and its arguments, or end the process with an error."""
    try:
        if options.module is not None:
            name, *args = options.module
            return scripts.find_module(name), args
        return scripts.find_file(options.script), options.args
    except scripts.NotFound as error:
        options.error(str(error))


def _check_device(options: argparse.Namespace) -> None:
    """End the process with an error if TANDEM_DEVICE names no device."""
    if environment.names_adapter():
        deferral.load()
        if error := environment.device_error():
            options.error(error)


def _launch(options: argparse.Namespace) -> int:
    """Run an unchanged script in several processes of this machine, or of several machines."""
    from torch_tandem._command import launch

    if not options.rest:
        options.error("a script is missing")
    torchrun, run = launch.split(options.rest)
    run_options = _parse(["run", *run])
    run_options.error = options.error
    if run_options.script == "-":
        options.error("standard input can be read only once, but several processes run the script")
    _find(run_options)
    _check_device(options)
    return launch.launch(options.processes, torchrun, run, options.report)


def _autoload(options: argparse.Namespace) -> int:
    """Turn autoloading on or off, or print its state. Autoloading lets `import torch` register the device."""
    from torch_tandem import autoload

    return autoload.main(options.state)


def _devices(options: argparse.Namespace) -> int:
    """Print the available devices."""
    from rich.console import Console
    from rich.table import Table

    environment.silence_drivers()
    deferral.load()

    from torch_tandem import api

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "name", "kind", "backend", "driver", "features"):
        table.add_column(column)
    for device in api.list_devices():
        table.add_row(
            str(device["index"]),
            device["name"],
            device["kind"],
            device["backend"],
            device["driver"],
            " ".join(device["features"]),
        )
    table.add_row("cpu", "PyTorch's CPU kernels", "", "", "", "")
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    return 0


def _writable(path: str) -> str:
    """Return the absolute path of a file to write, which stays valid if the script changes the directory.

    In the path, `%r` stands for the number of this rank.
    """
    path = os.path.abspath(path.replace("%r", _rank()))
    folder = os.path.dirname(path)
    if not os.access(folder, os.W_OK) or os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"cannot write {path!r}")
    return path


def _processes(text: str) -> str:
    if text not in ("auto", "cpu") and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return text


def _graph_file(path: str) -> str:
    if not path.endswith(GRAPHS):
        raise argparse.ArgumentTypeError(f"{path!r} ends in none of {', '.join(GRAPHS)}")
    return _writable(path)


def _version() -> str:
    from torch_tandem import __version__

    return f"torch-tandem {__version__}"


def _run(options: argparse.Namespace) -> int:
    """Run an unchanged PyTorch script on Tandem."""
    script, args = _find(options)
    _check_device(options)
    deferral.load()

    from torch_tandem import adopt, api, cuda_alias
    from torch_tandem._command import spawned
    from torch_tandem._compile import torch_compile
    from torch_tandem._functions import decorate
    from torch_tandem._report import notes

    try:
        functions = decorate.install(options.function)
        code = decorate.compile_script(script, functions) if functions else None
    except decorate.NoFunction as error:
        options.error(str(error))

    if options.mode:
        api.set_mode(options.mode)
    if options.report or options.trace:
        api.record()
    torch_compile.install(options.compile)
    if options.device_alias:
        cuda_alias.install()
        spawned.install(options.mode, options.compile)
    if options.adopt == "always":
        adopt.install()
        notes.add("the program's tensors were adopted (--adopt always)")
    elif options.adopt == "auto":
        adopt.install_unless_it_chooses(script.source())
    process = os.getpid()
    status, error = scripts.run(script, args, tracebacks.hide_all_frames, code)
    if os.getpid() == process:  # a child that the script has forked also gets here
        if error is not None and status:
            notes.add(f"the script ended with {tracebacks.summary(error)}")
        has_failed = isinstance(error, Exception)  # neither sys.exit nor Ctrl-C
        status = _finish(options, status, has_failed)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return status


def _finish(options: argparse.Namespace, status: int, has_failed: bool) -> int:
    """Wait for pending work and write the reports.

    Return the exit status, which is 1 if something here fails.

    If the script has failed, the summary is left out, because it would push the traceback off the screen.
    """
    from torch_tandem import api
    from torch_tandem._report.summaries import summaries

    try:
        api.synchronize()
    except Exception as late:
        if status == 0:  # otherwise this exception has most likely ended the script already
            scripts.write(f"tandem: an operator whose result was never read failed: {late}\n")
            status = 1
    report = api.report()
    for path, write in (
        (options.report, api.save_report),
        (options.report_json, lambda path: _write_json(path, report)),
        (options.trace, api.save_trace),
        (options.graph, api.save_graph),
    ):
        try:
            if path:
                write(path)
        except OSError as failure:
            scripts.write(f"tandem: cannot write {path}: {failure}\n")
            status = status or 1
    if not options.quiet and not has_failed and _rank() == "0" and sys.stderr:
        scripts.write("", sys.stdout)  # so that the summary follows the script's output
        # The reader of the pipe may have gone.
        with contextlib.suppress(OSError, ValueError):
            summaries().show(report, verbose=options.verbose)
    return status


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _write_json(path: str, report: Report) -> None:
    with open(path, "w") as file:
        json.dump(report, file, indent=2)
