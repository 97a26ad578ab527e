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
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jax_bwgemm._version import __version__
from jax_bwgemm.cli import bench, build, doctor, emulate, explain

COMMANDS: dict[str, ModuleType] = {
    "build": build,
    "doctor": doctor,
    "explain": explain,
    "bench": bench,
    "emulate": emulate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    given = sys.argv[1:] if argv is None else argv
    who = " ".join(["jax_bwgemm", *given[:1]]) if given[:1] and given[0] in COMMANDS else "jax_bwgemm"
    try:
        try:
            args = _parser().parse_args(given)
            return int(COMMANDS[args.command].run(args))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _discard_stdout()
        return _end(who, str(error), 2)
    except KeyboardInterrupt:
        return _end(who, "interrupted", 130)


def _end(who: str, why: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"{who}: {why}", file=sys.stderr)
    return code


def _discard_stdout() -> None:
    """What is still to be written to a stdout that is full or closed goes nowhere, so that the exit does not fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Says so if its help could not be written, as argparse's own does not."""

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message or "")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m jax_bwgemm", description="GEMMs for JAX on Hopper and Blackwell.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))
    return parser
