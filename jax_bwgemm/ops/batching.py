"""What `jax.vmap` makes of the primitives: one larger contraction with one more mode, never a loop. Nothing is moved.

A mode of both operands is a batch; of one, it is free. Where the result has it decides which dimension it will join at
lowering (`planner.views`): it stands beside the mode that it lies beside in its operand, so that a view will do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jax.sharding import NamedSharding, PartitionSpec

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import Epilogue
from jax_bwgemm.ops.primitive import fused_matmul_p, fused_product, matmul_p, product
from jax_bwgemm.ops.reference import aligned, finish

Dims = tuple[int | None, ...]


def _matmul_batch_rule(args: Any, dims: Dims, **params: Any) -> Any:
    wider, dim = _widened_params(args, dims, params)
    return product(*args, **wider), dim


def _fused_matmul_batch_rule(args: Any, dims: Dims, **params: Any) -> Any:
    if dims[:2] == (None, None):
        outs = _mapped_epilogue(args, dims, **params)
        return outs, (0,) * len(outs)
    wider, dim = _widened_params(args, dims, params)
    outs = fused_product(args[0], args[1], args[2:], **wider)
    return outs, (dim,) * len(outs)


def _mapped_epilogue(
    args: Any, dims: Dims, *, contraction: Contraction, epilogue: Epilogue, out_dtype: Any, **params: Any
) -> tuple[jax.Array, ...]:
    """Of one product, in float32."""
    params |= {"contraction": contraction.product, "epilogue": Epilogue(), "out_dtype": jnp.dtype("float32")}
    acc = product(*args[:2], **params)

    def finished(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return finish(acc, epilogue, aligned(operands, contraction), out_dtype)

    return jax.vmap(finished, dims[2:])(*args[2:])


def _widened_params(args: Any, dims: Dims, params: dict[str, Any]) -> tuple[dict[str, Any], int]:
    wider, dim = widened(params["contraction"], dims)
    sharding = params["out_sharding"]
    if sharding is not None:
        axis = next(jax.typeof(x).sharding.spec[i] for x, i in zip(args, dims, strict=True) if i is not None)
        spec = (*sharding.spec[:dim], axis, *sharding.spec[dim:])
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return params | {"contraction": wider, "out_sharding": sharding}, dim


def widened(contraction: Contraction, dims: Dims) -> tuple[Contraction, int]:
    """With one mode more, at `dims` of those operands that have it; and where the result does."""
    mode = contraction.free_mode()
    a, b, *extras = (
        modes if dim is None else modes[:dim] + mode + modes[dim:]
        for modes, dim in zip(contraction.operands, dims, strict=True)
    )
    at = _place(contraction, a, b, mode)
    out = contraction.out[:at] + mode + contraction.out[at:]
    return dataclasses.replace(contraction, a=a, b=b, out=out, extras=tuple(extras)), at


def _place(contraction: Contraction, a: str, b: str, mode: str) -> int:
    if (mode in a) == (mode in b):
        return 0
    own, free = (a, contraction.free_a) if mode in a else (b, contraction.free_b)
    before, _, after = own.partition(mode)
    if after[:1] and after[0] in free:
        return contraction.out.index(after[0])
    if before[-1:] and before[-1] in free:
        return contraction.out.index(before[-1]) + 1
    if contraction.batch and free:  # behind the batch, which the other operand has
        return min(map(contraction.out.index, free))
    return 0


batching.primitive_batchers[matmul_p] = _matmul_batch_rule
batching.primitive_batchers[fused_matmul_p] = _fused_matmul_batch_rule
