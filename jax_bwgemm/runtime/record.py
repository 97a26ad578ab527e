"""What became of the products that this process has lowered: counted, logged, and listed for who asks.

Knows no problem's meaning and no JAX.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import logging
import threading
from collections.abc import Iterator

LOGGER = logging.getLogger("jax_bwgemm")  # the package's only one; silent until somebody configures logging


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of a lowered program. `kernel` is None if it is XLA's; `reason` says why, or why XLA has the
    epilogue. `us` is the predicted or measured time of the kernel, with the passes that `notes` name; 0 for XLA's.
    `where` is the user's line, "file:line". `flops`: two for each pair of elements that are multiplied; `min_bytes`: of
    device memory, if every operand is read once and every result written once. 0 where nobody asks.

    What `is_beside` a product is none: an epilogue, or an einsum of another kind, that is XLA's; `problem` names it."""

    problem: str
    kernel: str | None = None
    us: float = 0.0
    reason: str | None = None
    notes: tuple[str, ...] = ()
    where: str = ""
    flops: int = 0
    min_bytes: int = 0
    is_beside: bool = False


@dataclasses.dataclass(frozen=True)
class Stats:
    """How often each kernel was lowered, and each product, or epilogue of one, that is XLA's, with its reason. A
    product in the body of a loop, or of a function that is lowered once, counts once; compiling for another shape
    counts again. What is XLA's on any device counts where it is traced, without its gradients."""

    kernels: dict[str, int]
    fallbacks: dict[str, int]

    def __str__(self) -> str:
        lines = [f"{sum(self.kernels.values())} kernels lowered"]
        lines += [f"  {num:4} {name}" for name, num in sorted(self.kernels.items())]
        lines += [f"{sum(self.fallbacks.values())} products and epilogues left to XLA"]
        return "\n".join(lines + [f"  {num:4} {name}" for name, num in sorted(self.fallbacks.items())])


_lock = threading.Lock()
_kernels: collections.Counter[str] = collections.Counter()
_fallbacks: collections.Counter[str] = collections.Counter()
_listed: contextvars.ContextVar[list[Product] | None] = contextvars.ContextVar("listed", default=None)
_runs = contextvars.ContextVar("runs", default=True)


def note(product: Product) -> None:
    """Counted and logged, or else listed."""
    if (listed := _listed.get()) is not None:
        listed.append(product)
        return
    with _lock:
        if product.kernel is not None:
            _kernels[product.kernel] += 1
        else:
            _fallbacks[f"{product.problem}: {product.reason}"] += 1
    where = f" at {product.where}" if product.where else ""
    LOGGER.debug("%s%s: %s", product.problem, where, product.kernel or f"XLA, {product.reason}")


def is_read() -> bool:
    """Whether anybody reads more of a product than its count."""
    return is_listed() or LOGGER.isEnabledFor(logging.DEBUG)


def is_listed() -> bool:
    """Whether somebody lists what this thread lowers, to be told what would run."""
    return _listed.get() is not None


def is_explained() -> bool:
    """Whether what this thread lowers will not run: no kernel is compiled for it, and what would be is listed."""
    return not _runs.get()


def drop(kernel: str) -> None:
    """The last product that `kernel` was noted for: another one took its place, and nobody reads its result."""
    if (listed := _listed.get()) is None:
        with _lock:
            _kernels[kernel] -= 1
        return
    found = [i for i, product in enumerate(listed) if product.kernel == kernel]
    if found:
        del listed[found[-1]]


@contextlib.contextmanager
def listed(runs: bool = True) -> Iterator[list[Product]]:
    """What this thread lowers in the block; without `runs`, for nobody to run it."""
    products: list[Product] = []
    tokens = _listed.set(products), _runs.set(runs)
    try:
        yield products
    finally:
        _listed.reset(tokens[0])
        _runs.reset(tokens[1])


def stats(reset: bool = False) -> Stats:
    """What became of the products that this process has lowered so far.

    Args:
      reset: whether to count from zero from now on.

    Returns:
      A `Stats`: print it. `kernels` counts each kernel by its name, `fallbacks` each
      "product: reason", or epilogue, of XLA's.

    Example:
      >>> jax_bwgemm.stats().kernels
      {'sm_90a_bf16_bf16_bf16_knn_128x256x64_cta1_cluster2x1_identity': 14}
    """
    with _lock:
        found = Stats(dict(+_kernels), dict(+_fallbacks))
        if reset:
            _kernels.clear()
            _fallbacks.clear()
    return found
