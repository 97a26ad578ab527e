"""A case's products as programs that go round copies of the operands, each compiled once. Knows no clock."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_bwgemm.bench.cases import Case
from jax_bwgemm.bench.peers import Candidate, Unavailable, candidates
from jax_bwgemm.bench.products import Product, ours
from jax_bwgemm.facts.arch import Arch
from jax_bwgemm.runtime import record

Operands = Mapping[str, jax.Array]
_VARIANT = re.compile(r'variant = "(\w+)"')  # an attribute of our custom call, in StableHLO
_CALL = re.compile(r'custom_call_target="([^"]+)"|"kind":"(__\w+)"')  # of XLA's optimized HLO


@dataclasses.dataclass(frozen=True)
class Program:
    """`run` takes all copies of the operands and returns as many results. `variants`: kernels of ours; `fallback` says
    why there are none."""

    run: Callable[[Sequence[Operands]], list[jax.Array]]
    config: str = ""
    calls: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    fallback: str = ""


def make_operands(case: Case, copies: int) -> list[Operands]:
    """Standard normal, and of integers all values alike."""
    names = list(case.operands)
    keys = jax.random.split(jax.random.key(0), (copies, len(names)))
    return [{name: _random(key, *case.operands[name]) for name, key in zip(names, copy, strict=True)} for copy in keys]


def compile_ours(case: Case, operands: Sequence[Operands]) -> Program:
    """With XLA in our kernels' place where there are none."""
    with record.listed() as products:
        lowered = jax.jit(_each(ours(case, "ignore"))).lower(operands)
    left = (product for product in products if product.kernel is None)
    fallback = next((f"XLA computes {product.problem}: {product.reason}" for product in left), "")
    return _program(lowered.compile(), variants=variants(lowered.as_text()), fallback=fallback)


def variants(stablehlo: str) -> tuple[str, ...]:
    """The kernels of ours that a lowered program calls."""
    return tuple(dict.fromkeys(_VARIANT.findall(stablehlo)))


def compile_peer(peer: str, case: Case, arch: Arch, operands: Sequence[Operands]) -> list[Program]:
    """Those of its candidates that run. Raises Unavailable, with the last one's reason, if there are none."""
    programs, reason = [], ""
    for candidate in candidates(peer, case, arch):
        try:
            program = _compile(candidate, operands)
            jax.block_until_ready(program.run(operands))
            programs.append(program)
        except Exception as error:  # others' code fails in ways of its own, and a refused flag is a JaxRuntimeError
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not programs:
        raise Unavailable(reason)
    return programs


def _compile(candidate: Candidate, operands: Sequence[Operands]) -> Program:
    function = jax.jit(_each(candidate.product), compiler_options=dict(candidate.options))
    return _program(function.lower(operands).compile(), config=candidate.config)


def _program(compiled: Any, **fields: Any) -> Program:
    calls = {target or kind for target, kind in _CALL.findall(compiled.as_text() or "")}
    return Program(compiled, calls=tuple(sorted(calls)), **fields)


def _each(product: Product) -> Callable[[Sequence[Operands]], list[Any]]:
    return lambda operands: [product(**copy) for copy in operands]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        return jax.random.bits(key, shape, jnp.uint8).astype(dtype)
    drawn = dtype if jnp.dtype(dtype).itemsize > 1 else "bfloat16"
    return jax.random.normal(key, shape, drawn).astype(dtype)
