"""What a CPU host lowers for CUDA, as text and as the custom calls in it: shared by the tests of the lowering."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_bwgemm
from jax_bwgemm.facts.recipe import Recipe
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner.candidates import Candidate
from jax_bwgemm.planner.plan import plan

BF16 = jnp.bfloat16
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
X = jax.ShapeDtypeStruct((512, 256), BF16)
W = jax.ShapeDtypeStruct((256, 1024), BF16)
CUDA = {"device": "h200", "on_fallback": "error"}


def hlo(f, *args, platform="cuda") -> str:
    """Of a function that no cache has seen."""
    return jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def calls(text: str) -> list[dict[str, str]]:
    """The attributes of our custom calls, as text, with the operand and result types under "types"."""
    found = []
    for line in text.splitlines():
        if "@jax_bwgemm_matmul_v2" in line:
            fields = dict(re.findall(r'(\w+) = ("[^"]*"|[^,{}]+)', line))
            fields["types"] = line.rsplit(" : ", 1)[1]
            found.append({name: value.strip('"') for name, value in fields.items()} | majors_of(line))
    return found


def majors_of(line: str) -> dict[str, str]:
    """The contiguous dimensions of a, b and the result, called c, of a custom call."""
    pattern = r"\b{}:\w+\[[^]]*(\w)\+?\]"
    return {
        f"{x}_major": re.findall(pattern.format(role), line)[0]
        for x, role in zip("abc", ("a", "b", "out"), strict=True)
    }


def recipe(call: dict[str, str]) -> Recipe:
    return Recipe.from_texts(call)


def swizzles(call: dict[str, str]) -> list[tuple[int, int]]:
    """(span, atom) in bytes of each tensor map."""
    return [(facts.swizzle_bytes, facts.swizzle_atom_bytes) for facts in recipe(call).tensor_maps]


def majors(text: str) -> list[str]:
    return [call["a_major"] + call["b_major"] for call in calls(text)]


def asked_majors(text: str) -> list[str]:
    """The same of the product that was asked, where the kernel computes its transpose."""
    as_asked = {"k": "k", "n": "m", "m": "n"}  # how b's transpose lies, and a's
    return [
        own if call["c_major"] == "n" else as_asked[own[1]] + as_asked[own[0]]
        for own, call in zip(majors(text), calls(text), strict=True)
    ]


def operand_barriers(text: str) -> int:
    """Those that are not behind one of our custom calls, for its result."""
    results = [line.split(" = ")[0].strip() for line in text.splitlines() if "@jax_bwgemm_matmul_v2" in line]
    names = {result.partition(":")[0] for result in results}  # %4:2, with a workspace, which is %4#0 and %4#1
    barriers = [line.split("optimization_barrier")[1] for line in text.splitlines() if "optimization_barrier" in line]
    return sum(barrier.split(" : ")[0].strip().partition("#")[0] not in names for barrier in barriers)


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def matmul(a, b, **kwargs):
    return jax_bwgemm.matmul(a, b, **CUDA | kwargs)


def on_b200(a, b, **kwargs):
    return jax_bwgemm.matmul(a, b, **{"device": "b200", "on_fallback": "error"} | kwargs)


def swapping(problem, arch, tile=None, missing=lambda variant: None, **_):
    """A planner that likes nothing but C^T = B^T A^T."""
    return plan(problem, arch, None, missing, [Candidate(tile or Tile(64, 128), problem.transposed, swapped=True)])


def collectives(text: str) -> list[str]:
    """Of a program behind the partitioner."""
    return sorted(re.findall(rf"\b({COLLECTIVES})(?:-start)?\(", text))


def partitioned(f: Callable[..., Any], operands: Sequence[Any], directory: Path) -> str:
    """The HLO behind the partitioner. A CPU cannot compile what is in it."""
    options = {"xla_dump_to": str(directory), "xla_dump_hlo_pass_re": "spmd.*"}
    with pytest.raises(Exception, match="No FFI handler registered for jax_bwgemm"):
        jax.jit(lambda *x: f(*x)).lower(*operands).compile(compiler_options=options)
    (found,) = directory.glob("*after_spmd-partitioning*")
    return found.read_text()
