"""Works on many things by several processes, of which one at a time measures: compiling, which takes longest, does not
wait for the GPU. Knows no product."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from jax_bwgemm import _processes
from jax_bwgemm.bench import timing

Asked = TypeVar("Asked")
Found = TypeVar("Found")


def share_memory(num_processes: int) -> None:
    """Before JAX starts, here: of several processes none may take most of the GPU's memory for itself."""
    if num_processes > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def each(
    function: Callable[[Asked], Found], asked: Sequence[Asked], num_processes: int = 1
) -> Iterator[tuple[int, Found]]:
    """(position, what the function found) of all that is `asked`, as they come. More than one process need functions
    that can be pickled; their exceptions are raised here."""
    if num_processes == 1:
        yield from enumerate(map(function, asked))
        return
    with tempfile.TemporaryDirectory() as place:
        start = functools.partial(_start, os.getpid(), Path(place) / "turn")
        with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), start) as executor:
            futures = {executor.submit(function, x): i for i, x in enumerate(asked)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                executor.shutdown(wait=True, cancel_futures=True)


def _start(parent: int, turn: Path) -> None:
    _processes.end_with_parent(parent)
    timing.take_turns(turn)
