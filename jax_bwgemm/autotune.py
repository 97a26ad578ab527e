"""`autotune`: the products of a function are timed on this GPU, and the planner follows what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.measured import key, user_path
from jax_bwgemm.runtime.attempts import asked_problems
from jax_bwgemm.runtime.decision import measurements

if TYPE_CHECKING:
    from jax_bwgemm.bench.candidates import Timed

ROUNDS = 21


@dataclasses.dataclass(frozen=True)
class TunedProduct:
    """`tile` was the fastest, in `us`; the cost model alone would choose `modelled_tile`, which took `modelled_us`.
    XLA took `xla_us`, if it computes the same: of a product without an epilogue, of elements of 2 bytes or more."""

    product: str
    tile: str
    us: float
    modelled_tile: str
    modelled_us: float
    xla_us: float | None = None


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """What `autotune` did: products timed now, those whose times `table` or the package had, and those that no kernel
    at hand computes."""

    table: Path
    timed: tuple[TunedProduct, ...]
    known: tuple[str, ...]
    without_kernel: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.timed)} products timed, {len(self.known)} known: {self.table}"]
        for p in self.timed:
            was = f", {p.modelled_us:.1f} us with {p.modelled_tile}" if p.modelled_tile != p.tile else ""
            xlas = "" if p.xla_us is None else f", {p.xla_us:.1f} us with XLA"
            lines.append(f"  {p.product}: {p.us:.1f} us with {p.tile}{was}{xlas}")
        return "\n".join(lines + [f"  {product}: no kernel at hand" for product in self.without_kernel])


def autotune(f: Callable[..., Any], *args: Any, **kwargs: Any) -> TuningReport:
    """Times the kernels that can compute the products of `f`, but those that are predicted to take twice as long as the
    best, and the fastest ones in every order of tiles, beside XLA, so that later calls run what is fastest: a product
    that XLA was faster with, by 1 % or more, is left to it.

    `f` is lowered, not run: every `matmul` in it is seen, in whatever transformation, with the layouts that the
    compiled function would have. Products whose times are known already are left alone. The times go into the table
    `~/.cache/jax_bwgemm/tables/DEVICE.json` (in `JAX_BWGEMM_TABLES` if set), which all processes read from then on.
    A function that is compiled already keeps its kernels until `jax.clear_caches()`. `tile=` wins over any table.

    Args:
      f: a function of arrays; close over what is static. For a training step pass the step, or `jax.grad(loss)`.
      *args: what `f` is called with; only shapes and dtypes are read, so `jax.ShapeDtypeStruct` will do.
      **kwargs: the same.

    Returns:
      A `TuningReport`: print it.

    Raises:
      ValueError: without a Hopper or Blackwell GPU, the library or CUPTI.
      OSError, ValueError: the table cannot be written; set `JAX_BWGEMM_TABLES`.
      Exception: what `f` raises.

    Example: `print(jax_bwgemm.autotune(jax.grad(loss), params, batch))`
    """
    from jax_bwgemm.bench import candidates, machine, tune  # here, so that `import jax_bwgemm` leaves them out

    arch = candidates.gpu_arch("`autotune`")
    problems = products(f, args, kwargs, arch)
    known = [problem for problem in problems if measurements(problem, arch, borrows=False) is not None]
    table = user_path(arch.name)
    new = [problem for problem in problems if problem not in known]
    timed = tune.tune(new, arch, ROUNDS, table, machine.describe())
    names = {key(found.problem): _tuned(found) for found in timed}
    without = [key(problem) for problem in new if key(problem) not in names]
    return TuningReport(table, tuple(names.values()), tuple(map(key, known)), tuple(without))


def products(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arch: Arch) -> list[Problem]:
    """What the lowering of `f` for CUDA asks the planner, each `key` once; a product that can be had in several ways
    in each that it asks about."""

    def fresh(*args: Any, **kwargs: Any) -> Any:  # of a function that was lowered before, nothing would be asked
        return f(*args, **kwargs)

    with asked_problems() as asked:
        jax.jit(fresh).trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    return list({key(problem): problem for problem, own in asked if own.name == arch.name}.values())


def _tuned(timed: Timed) -> TunedProduct:
    best, model = timed.fastest, timed.modelled_idx
    times, names = timed.times_us, (timed.name(best), timed.name(model))
    return TunedProduct(key(timed.problem), names[0], times[best], names[1], times[model], timed.xla_us)
