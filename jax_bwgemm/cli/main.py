"""`python -m jax_bwgemm build | doctor | explain | bench | emulate`: parses the command line and nothing else.

A command is a module of this room with HELP, `add_arguments(parser)` and `run(args) -> exit code`. ValueError, a file
that cannot be read or written, and what is not installed become one line on stderr; everything else is a bug and keeps
its traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_bwgemm._version import __version__
from jax_bwgemm.cli import bench, build, doctor, emulate, explain

COMMANDS = {"build": build, "doctor": doctor, "explain": explain, "bench": bench, "emulate": emulate}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except BrokenPipeError:  # `__main__`'s
        raise
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"jax_bwgemm {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_bwgemm", description="GEMMs for JAX on Hopper and Blackwell.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))
    return parser
