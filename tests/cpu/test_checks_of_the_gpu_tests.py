"""What tests/gpu/test_variants.py says of a kernel's results, where no GPU is: right ones pass, wrong ones do not.

A stand-in computes them with numpy, from the operands and in the places that a kernel has.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.bench.accuracy import evaluate
from jax_bwgemm.facts.arch import Arch, by_name
from jax_bwgemm.facts.epilogue import in_place
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue
from tests.gpu import test_variants

Products = Callable[..., list[jax.Array]]


def _one_of_each_kind() -> dict[str, Variant]:
    """Expressions beyond `activation(alpha * acc + bias) + residual`, by the way in which their results are stored."""
    own = (x for x in catalogue(["sm_90a"]) if in_place(x.steps) is None and not x.tile.symmetric)
    found: dict[str, Variant] = {}
    for variant in own:
        found.setdefault(f"{variant.steps} {variant.c_major}", variant)
    return found


KINDS = _one_of_each_kind()


def _stand_in(off: float) -> Callable[[Any, Problem, Arch], Products]:
    """In place of `all_forced`; every first element is `off` by so much."""

    def all_forced(entry: Any, problem: Problem, arch: Arch) -> Products:
        is_turned, epilogue = problem.c_major == "m", problem.epilogue

        def products(a: jax.Array, *others: jax.Array) -> list[jax.Array]:
            bs, extras = others[: problem.num_bs], others[problem.num_bs :]
            left = _wide(a, problem.a_major != "k")
            sums = [left @ _wide(b, problem.b_major != "n") for b in bs]
            known: dict[str, Any] = dict(zip(("acc", "up"), sums, strict=False)) | dict(epilogue.scalars)
            for x, extra in zip(epilogue.operands, extras, strict=True):
                known[x.role] = _wide(extra, is_turned and x.place == "mn")
            whole = (problem.batch, problem.m, problem.n)
            results = [np.broadcast_to(evaluate(node, known), whole).copy() for _, node in epilogue.results]
            for y in epilogue.reductions:
                values = np.broadcast_to(evaluate(y.node, known), whole)
                results.append((np.sum if y.reducer == "sum" else np.max)(values, 1 if y.place == "n" else 2))
            for result in results:
                result.flat[0] += off
            dtypes = [jnp.dtype(problem.out_dtype)] * len(epilogue.results) + [np.float32] * len(epilogue.reductions)
            turned = [z.swapaxes(1, 2) if is_turned and z.ndim == 3 else z for z in results]
            return [jnp.asarray(z.astype(dtype)) for z, dtype in zip(turned, dtypes, strict=True)]

        return products

    return all_forced


def _wide(x: jax.Array, is_turned: bool) -> np.ndarray:
    wide = np.asarray(x).astype(np.float64)
    return wide.swapaxes(1, 2) if is_turned else wide


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def use(off: float) -> None:
        monkeypatch.setattr(test_variants, "all_forced", _stand_in(off))
        monkeypatch.setattr(test_variants, "ARCH", by_name("h200"))
        monkeypatch.setattr(jax, "jit", lambda f: f)

    return use


@pytest.mark.parametrize("kind", KINDS)
def test_expressions(kind: str, stand_in: Callable[[float], None]) -> None:
    entry = SimpleNamespace(name=kind, variant=KINDS[kind])
    shape = test_variants.edge_shapes(entry.variant)[1]
    stand_in(0.0)
    test_variants._check_expression(entry, shape, seed=1)
    stand_in(1e3)
    with pytest.raises(AssertionError, match=r"of the bound"):
        test_variants._check_expression(entry, shape, seed=1)


def test_there_are_expressions_of_both_majors() -> None:
    assert {kind[-1] for kind in KINDS} == {"m", "n"}
