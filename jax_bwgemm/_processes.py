"""Processes of our own: none waits for what another left open, and none outlives who started it. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1  # prctl(2)
_TAIL_BYTES = 65536


def run(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str | None:
    """Runs a program in a session of its own, which is killed after `timeout_s` and with any exception; None, or why it
    failed: its last line on stderr. OSError where it cannot be started.

    stderr is a file: a pipe stays open while any process that the program started lives, also if the program is dead.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"it took more than {timeout_s:g} s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return None if code == 0 else _why(code, said)


def _why(code: int, said: IO[bytes]) -> str:
    if code < 0:
        return f"it was ended by signal {-code}"
    said.seek(max(0, said.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {code}"


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What is started in the block never sees the terminal's Ctrl-C, which goes to all: who started it ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process as soon as the one that started it, whose id is `parent`, has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has
        os._exit(1)
