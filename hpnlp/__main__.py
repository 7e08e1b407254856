"""`hpnlp COMMAND ...` and `python -m hpnlp COMMAND ...` are the same."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import re
import sys
import traceback
from typing import NoReturn

COMMANDS = {
    "train": "train what an experiment file describes, or go on with it, and report",
    "generate": "continue prompts with a trained model",
    "sweep": "run an experiment's get_sweep(), what is not yet finished of it",
    "compare": "one table and one plot of several runs",
    "plan": "say what an experiment will take on devices that are not there, and which layouts fit",
    "draw": "draw attention masks, their live tiles, and what they cost beside dense attention",
    "convert": "Hugging Face checkpoints to runs, and back",
}
WATCHED = ("train", "sweep")  # commands that react to signals as `hpnlp.training.signals` describes


def main() -> None:
    """Runs the command that sys.argv names.

    Exit codes:
        0: done.
        1: a defect of hpnlp, with a traceback; or, without a message, a command that only prints into a closed pipe.
        2: bad input or a fault of the machine, with one line; also where all files are written and stdout could not be.
        130: Ctrl-C, with one line; training and sweeps also at the other signals of `hpnlp.training.signals`.
    """
    atexit.register(gc.freeze)  # what is left when all is done need not be looked through
    _open_standard_descriptors()
    argv = sys.argv[1:] or ["--help"]
    try:
        with contextlib.ExitStack() as stack:
            if argv[0] in WATCHED:
                from hpnlp.training import signals

                stack.enter_context(signals.watched())
            _guarded(argv)
    except KeyboardInterrupt:  # training saves first, and does not get here
        print("hpnlp: interrupted", file=sys.stderr)
        sys.exit(130)


def _open_standard_descriptors() -> None:
    """Opens the null device as stdin, stdout or stderr where one is closed: the next file would take its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _guarded(argv: list[str]) -> None:
    """Runs a command with its errors explained in one line, and with exit codes as `main` has them."""
    from hpnlp.cli import output  # imports JAX, which takes a second

    with output.guarded(argv) as stdout:
        code: object = 0
        try:
            try:
                _main(argv[0])
            finally:
                sys.stdout.flush()
        except SystemExit as stop:
            code = stop.code or 0
        except BrokenPipeError:
            sys.exit(1)
        except Exception as error:
            _refuse(error)
        finally:
            if stdout.escaped:
                print(
                    f"hpnlp: stdout takes {stdout.encoding} only, and other characters were written as \\uXXXX: set "
                    "PYTHONIOENCODING=utf-8",
                    file=sys.stderr,
                )
        if stdout.failure and code in (0, 130):
            print(f"hpnlp: {stdout.message}", file=sys.stderr)
            code = code or 2
        if code:
            sys.exit(code)


def _refuse(error: Exception) -> NoReturn:
    """Exits with 2 and one line where the input or the machine is at fault; raises `error` again otherwise."""
    from hpnlp.cli.errors import explained
    from hpnlp.types import InputError

    line = str(error) if isinstance(error, InputError) else explained(error)
    if not line:
        raise error
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    print(f"hpnlp: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)


def spare_threads() -> None:
    """Threads for what a CPU's pretended devices wait for; before jax is imported.

    XLA keeps one a device, and a collective holds one until all devices have come. Where two collectives do not depend on each
    other, devices may enter them in different orders, and with no thread left for the other one none ever comes.
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))[-1:]
    asked += re.findall(r"^\d+$", os.environ.get("JAX_NUM_CPU_DEVICES", ""))
    if asked:
        # Those that this process may use, as XLA counts them.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("NPROC", str(max(4 * max(map(int, asked)), cores)))


def _main(name: str) -> None:
    spare_threads()
    if name in ("--help", "-h", "help"):
        print("hpnlp COMMAND [--flag=value ...]\n\nCommands (each has --help):")
        print("\n".join(f"  {command:10} {purpose}" for command, purpose in COMMANDS.items()))
        return
    if name == "--version":
        from hpnlp import __version__

        print(__version__)
        return

    from hpnlp.spec import lookup

    lookup(COMMANDS, name, "command")
    importlib.import_module(f"hpnlp.cli.{name}").run(["hpnlp " + name, *sys.argv[2:]])


if __name__ == "__main__":
    main()
