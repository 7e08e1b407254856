"""Command line: `hpnlp COMMAND ...`, or `python -m hpnlp COMMAND ...`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys

COMMANDS = {
    "train": "train the model of an experiment or a task, or resume its training, and write a report",
    "check-data": "list all faults of the data that an experiment names, with their places",
    "generate": "continue prompts with a trained model",
    "predict": "predict labels, tags, targets or similarities of texts with a trained model",
    "encode": "write a file of vectors of texts by an encoder or a dual encoder",
    "evaluate": "score a run on held-out data, also with another memory or other data",
    "inspect": "measure the attention matrices of a trained model, and its loss by the length of the context",
    "profile": "divide the time of a training step or of a forward pass among the parts of the model",
    "advise": "measure which techniques make a model faster or smaller here, and keep its quality",
    "techniques": "list ways to make a model faster or smaller, and which of them a run can have",
    "sweep": "train all variants of an experiment that have not finished",
    "launch": "train with several processes and restart them, or write a manifest for SLURM, JobSet or xpk",
    "compare": "compare runs in a table and a plot",
    "plan": "estimate memory and time of an experiment on devices that need not exist, and find layouts that fit",
    "scaling": "plan a study of scaling laws, and fit its runs",
    "draw": "draw attention masks and print their cost relative to dense attention",
    "lra": "train mixers on tasks of the Long Range Arena, or measure their speed and memory by length",
    "compress": "make a smaller model of a run, and measure its size, time and quality",
    "export": "write the model of a run as a directory to serve, or as one file for JAX or ONNX runtimes",
    "neighbours": "list words that are similar to a word, and draw word vectors",
    "index": "build, merge and search an index of texts, or of the hidden states of a language model (kNN-LM)",
    "mix": "mix a language model with neighbours from its training text, and score it beside compressors",
    "convert": "convert Hugging Face checkpoints to runs, and runs to checkpoints",
    "completion": "print a script by which bash, zsh or fish completes commands and flags",
}
# Commands that react to signals as `hpnlp.training.processes.signals` describes.
HANDLES_SIGNALS = ("train", "sweep", "lra", "compress", "launch", "advise")


def main() -> None:
    """Runs the command that `sys.argv` names, and exits the process with its exit code.

    Exit codes:
        0: success.
        1: a defect of hpnlp, with a traceback; or, without a message, a closed output pipe of a command that only prints.
        2: invalid input or an error of the machine, with one line on stderr; or all files were written, but not stdout.
        75: a condition that may pass, with one line on stderr: a lost process, processes that did not find each other, a port
            in use, a directory that another process writes, a full disk, a stale file handle. Try again later.
        130: Ctrl-C, with one line on stderr; for HANDLES_SIGNALS also the other signals of `hpnlp.training.processes.signals`.
    """
    atexit.register(gc.freeze)  # skips the garbage collection of all objects when the process ends
    _open_standard_descriptors()
    argv = sys.argv[1:] or ["--help"]
    if argv[0] == "help" and argv[1:]:
        argv = sys.argv[1:] = [argv[1], "--help"]
    try:
        with contextlib.ExitStack() as stack:
            if argv[0] in HANDLES_SIGNALS:
                from hpnlp.training.processes import signals

                stack.enter_context(signals.watched())
            _run_guarded(argv)
    except KeyboardInterrupt:  # training saves a checkpoint instead of raising it
        print("hpnlp: interrupted", file=sys.stderr)
        sys.exit(130)


def _open_standard_descriptors() -> None:
    """Opens the null device as stdin, stdout or stderr where one is closed, else the next opened file takes its descriptor."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _run_guarded(argv: list[str]) -> None:
    """Runs a command. Prints errors in one line, and exits with the codes of `main`."""
    from hpnlp.cli import output  # after the signal handlers are set

    with output.guarded(argv) as stdout:
        code: object = 0
        try:
            try:
                _run_command(argv[0])
            finally:
                sys.stdout.flush()
        except SystemExit as stop:
            code = stop.code or 0
        except BrokenPipeError:
            sys.exit(1)
        except Exception as error:
            from hpnlp.cli.errors import exit_with_message

            exit_with_message(error)
        finally:
            if stdout.escaped:
                fix = "" if stdout.encoding.lower() == "utf-8" else ": set PYTHONIOENCODING=utf-8"
                line = f"the encoding of stdout is {stdout.encoding}, and other characters were written as \\uXXXX{fix}"
                print(f"hpnlp: {line}", file=sys.stderr)
        if stdout.failure and code in (0, 130):
            print(f"hpnlp: {stdout.message}", file=sys.stderr)
            code = code or 2
        if code:
            sys.exit(code)


def spare_threads() -> None:
    """Sets NPROC so that XLA has spare threads for simulated CPU devices; takes effect before jax is imported.

    XLA starts one thread for each device, and a collective occupies a thread until all devices have reached it. Devices may
    reach two independent collectives in different orders. With no thread left for the second one, no device ever reaches it.
    """
    from hpnlp.jobs.launch.devices import simulated

    if devices := simulated(os.environ):
        # Cores that this process may use, as XLA counts them.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("NPROC", str(max(4 * devices, cores)))


def _run_command(name: str) -> None:
    """Prints help or the version, or imports and runs a command."""
    spare_threads()
    if name in ("--help", "-h", "help"):
        print("hpnlp COMMAND [--flag=value ...]\n\nCommands (each has --help):")
        print("\n".join(f"  {command:10} {purpose}" for command, purpose in COMMANDS.items()))
        return
    if name == "--version":
        from hpnlp.version import __version__

        print(__version__)
        return

    from hpnlp.errors import InputError
    from hpnlp.spec import lookup

    lookup(COMMANDS, name, "command")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the working directory does not exist any more: change to another one, as by cd") from error
    os.environ["MPLBACKEND"] = "agg"  # commands draw to files; an unknown backend would fail
    importlib.import_module(f"hpnlp.cli.{name.replace('-', '_')}").run(["hpnlp " + name, *sys.argv[2:]])


if __name__ == "__main__":
    main()
