"""`deterministic="batch"` on silicon: the bits of a row among other rows, in batches, and divided over two devices.

JAX_BWGEMM_BATCH_CASES says how many random products; 10,000 of them take hours of one process.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.planner.candidates import why_not_invariant
from jax_bwgemm.runtime.config import FallbackError
from jax_bwgemm.runtime.decision import kernels, target_arch
from tests.gpu.forced import forced
from tests.invariance import differing, random_case

ARCH = target_arch(None)
CASES, BLOCK = int(os.environ.get("JAX_BWGEMM_BATCH_CASES", "300")), 10


@pytest.mark.parametrize("block", range(-(-CASES // BLOCK)))
def test_rows_keep_their_bits(block: int) -> None:
    refused = []
    for seed in range(block * BLOCK, min(CASES, (block + 1) * BLOCK)):
        case = random_case(seed)
        try:
            assert differing(case) == [], case
        except FallbackError as error:  # no kernel has it, and that was said
            refused.append(f"{case}: {error}")
        jax.clear_caches()
    print(*refused, sep="\n")
    assert len(refused) <= BLOCK // 2


@pytest.mark.parametrize("k", [200, 4096])
@pytest.mark.parametrize("majors", ["kn", "kk"])
def test_one_order_in_all_tiles(majors: str, k: int) -> None:
    """Every tile that the policy leaves computes the same bits. Of the others, how many do is printed: for few rows,
    it is what would allow them."""
    if not isinstance(ARCH, Arch):
        pytest.skip(str(ARCH))
    rng = np.random.default_rng(0)
    few, n = 48, 520
    problem = Problem(few, n, k, a_major=majors[0], b_major=majors[1])
    a, b = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((1, few, k), (1, k, n)))
    stored = jnp.asarray(a), jnp.asarray(b if majors[1] == "n" else np.ascontiguousarray(b.swapaxes(1, 2)))
    bits = []
    for made in kernels(problem, ARCH)[1]:
        assert made.plan is not None and made.plan.chosen is not None and made.entry is not None
        chosen = made.plan.chosen
        operands = stored[::-1] if made.plan.swapped else stored
        product = forced(made.entry, made.plan.problem, ARCH, stream=made.plan.stream)
        out = np.asarray(jax.jit(product)(*operands))  # of a transposed product the same bytes
        assert out.shape == (1, few, n)
        bits.append((chosen, out.view(np.uint16)))
    allowed = [out for candidate, out in bits if why_not_invariant(candidate) is None]
    assert len(allowed) > 3 and all(np.array_equal(out, allowed[0]) for out in allowed)
    for what in ("it divides k", "it is for few rows"):
        out = [x for candidate, x in bits if (why_not_invariant(candidate) or "").startswith(what)]
        same = sum(np.array_equal(x, allowed[0]) for x in out)
        print(f"of {len(out)} tiles that are left out, since {what}, {same} have the same bits")
