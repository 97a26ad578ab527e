"""`python -m jax_bwgemm build | doctor | explain | bench | emulate`: parses the command line and nothing else.

A command is a module of this room with HELP, `add_arguments(parser)` and `run(args) -> exit code`. What ends one early
is one line on stderr and an exit code: 2 for ValueError, a file that cannot be read or written and what is not
installed, 130 for Ctrl-C. A reader of stdout that has seen enough, such as head, is worth no line: 1. Everything else
is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

from jax_bwgemm._version import __version__
from jax_bwgemm.cli import bench, build, doctor, emulate, explain

COMMANDS: dict[str, ModuleType] = {
    "build": build,
    "doctor": doctor,
    "explain": explain,
    "bench": bench,
    "emulate": emulate,
}


AGAIN_S = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    who = " ".join(["jax_bwgemm", *given[:1]]) if given[:1] and given[0] in COMMANDS else "jax_bwgemm"
    try:
        try:
            with _interruptible():
                args, unknown = _parser().parse_known_args(given)
                if unknown:  # said here, where the command is known
                    raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; see `python -m {who} --help`")
                return int(COMMANDS[args.command].run(args))
        finally:
            _flush()
    except BrokenPipeError:
        _discard_stdout()
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _discard_stdout()
        return _end(who, str(error), 2)
    except KeyboardInterrupt:
        return _end(who, "interrupted", 130)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C in a callback of the garbage collector, of which JAX has one, is printed and swallowed by Python: here it
    is silent, and comes again in a moment."""

    def again(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            hook(unraisable)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook, alarm = sys.unraisablehook, signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)


def _end(who: str, why: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"{who}: {why}", file=sys.stderr)
    return code


def _flush() -> None:
    if sys.stdout is not None:  # as of a shell's `>&-`, where nothing is printed
        sys.stdout.flush()


def _discard_stdout() -> None:
    """What is still to be written to a stdout that is full or closed goes nowhere, so that the exit does not fail."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Says so if its help could not be written, as argparse's own does not. An error is one line without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see `{self.prog} --help`")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message or "")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m jax_bwgemm", description="GEMMs for JAX on Hopper and Blackwell.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))
    return parser
