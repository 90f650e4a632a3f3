"""The command `tandem`."""

import argparse
import json
import os
import re
import signal
import sys

from torch_tandem._report_types import Report

USAGE = "tandem run [options] (script.py | -m module) [arguments of the script]"


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
    return commands[options.command](options)


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
        metavar="MODULE:NAME",
        help="make a function a torch_tandem.function, whose equal calls are replayed without Python; "
        "__main__:step for a function of the script. May be given several times (docs/functions.md)",
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
        type=_writable,
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
    # Options of torchrun are not known here, and may follow this command's own.
    end = _end_of_launch(argv) if argv[:1] == ["launch"] else len(argv)
    options = parser.parse_args(argv[:end])
    if options.command == "launch":
        options.rest, options.error = argv[end:], launch.error
    if options.command in ("autoload", "devices", "launch"):
        return options
    options.error = {"run": run, "compare": compare}[options.command].error
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
    from torch_tandem import _compare, _script

    if options.steps < 10:
        options.error("argument --steps: 10 iterations are the minimum")
    try:
        if options.module is not None:
            name, *args = options.module
            _script.find_module(name)
        else:
            name, args = options.script, options.args
            _script.find_file(name)
    except _script.NotFound as error:
        options.error(str(error))
    kind = "script" if options.module is None else "module"
    return _compare.compare([kind, name, *args], options.steps)


def _launch(options: argparse.Namespace) -> int:
    """Run an unchanged script in several processes of this machine, or of several machines."""
    from torch_tandem import _launch

    if not options.rest:
        options.error("a script is missing")
    return _launch.launch(options.processes, options.rest, options.report)


def _autoload(options: argparse.Namespace) -> int:
    """Let `import torch` register the device where TANDEM_AUTOLOAD is set, stop that, or print the state."""
    from torch_tandem import autoload

    return autoload.main(options.state)


def _devices(options: argparse.Namespace) -> int:
    """Print the available devices."""
    from rich.console import Console
    from rich.table import Table

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

    `%r` is the number of this rank.
    """
    path = os.path.abspath(path.replace("%r", _rank()))
    folder = os.path.dirname(path)
    if not os.access(folder, os.W_OK) or os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"cannot write {path!r}")
    return path


def _version() -> str:
    from torch_tandem import __version__

    return f"torch-tandem {__version__}"


def _run(options: argparse.Namespace) -> int:
    """Run an unchanged PyTorch script on Tandem."""
    from torch_tandem import _compile, _decorate, _notes, _script, _spawned, adopt, api, cuda_alias

    try:
        functions = _decorate.install(options.function)
        if options.module is not None:
            name, *args = options.module
            script = _script.find_module(name)
        else:
            script, args = _script.find_file(options.script), options.args
        code = _decorate.compile_script(script, functions) if functions else None
    except (_script.NotFound, _decorate.NoFunction) as error:
        options.error(str(error))

    if options.mode:
        api.set_mode(options.mode)
    if options.report or options.trace:
        api.record()
    _compile.install(options.compile)
    if options.device_alias:
        cuda_alias.install()
        _spawned.install(options.mode, options.compile)
    if options.adopt == "always":
        adopt.install()
        _notes.add("the program's tensors were adopted (--adopt always)")
    elif options.adopt == "auto":
        adopt.install_unless_it_chooses(script.source())
    process = os.getpid()
    error = _script.run(script, args, code)
    status = _show(error)
    if os.getpid() == process:  # a child that the script forked also gets here
        status = _finish(options, status)
    return _exit(error, status)


def _show(error: BaseException | None) -> int:
    """Print the exception that ended the script, as Python does, and return the exit status."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _finish(options: argparse.Namespace, status: int) -> int:
    """Wait for pending work and write the reports. Return the exit status, 1 if something here fails."""
    from torch_tandem import api
    from torch_tandem._summaries import summaries

    sys.stdout.flush()
    try:
        api.synchronize()
    except Exception as late:
        if status == 0:  # otherwise this exception has most likely ended the script already
            print(f"tandem: an operator whose result was never read failed: {late}", file=sys.stderr)
            status = 1
    report = api.report()
    if not options.quiet and _rank() == "0":
        summaries().show(report)
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
            print(f"tandem: cannot write {path}: {failure}", file=sys.stderr)
            status = status or 1
    return status


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _write_json(path: str, report: Report) -> None:
    with open(path, "w") as file:
        json.dump(report, file, indent=2)


def _exit(error: BaseException | None, status: int) -> int:
    if isinstance(error, KeyboardInterrupt):
        # Like Python, end by the signal itself, so that the shell sees a process that SIGINT ended.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status
