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
    count = len(params["contraction"].factors)
    if all(dim is None for dim in dims[:count]):
        outs = _mapped_epilogue(args, dims, **params)
        return outs, (0,) * len(outs)
    args, dims = _alike(args, dims, count)
    wider, dim = _widened_params(args, dims, params)
    outs = fused_product(args[0], args[1], args[2:], **wider)
    found: Contraction = wider["contraction"]
    reduced = [modes.index(found.out[dim]) for modes in found.reduced]
    return outs, (*[dim] * (len(outs) - len(reduced)), *reduced)


def _mapped_epilogue(
    args: Any, dims: Dims, *, contraction: Contraction, epilogue: Epilogue, out_dtype: Any, **params: Any
) -> tuple[jax.Array, ...]:
    """Of one product, in float32; of a gated one, two."""
    alone = dataclasses.replace(contraction, extras=(), num_bs=1, reduced=())
    params |= {"contraction": alone, "epilogue": Epilogue(), "out_dtype": jnp.dtype("float32")}
    count = len(contraction.factors)
    sums = tuple(fused_product(args[0], b, (), **params)[0] for b in args[1:count])

    def finished(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return finish(sums, epilogue, aligned(operands, contraction), out_dtype, contraction.reduced_axes)

    return jax.vmap(finished, dims[count:])(*args[count:])


def _alike(args: Any, dims: Dims, count: int) -> tuple[Any, Dims]:
    """With every b mapped where the first that is mapped is: they have the same modes."""
    dim = next((dim for dim in dims[1:count] if dim is not None), None)
    if dim is None or all(own == dim for own in dims[1:count]):
        return args, dims
    size = next(x.shape[own] for x, own in zip(args, dims, strict=True) if own is not None)
    bs = [
        jnp.broadcast_to(jnp.expand_dims(x, dim), (*x.shape[:dim], size, *x.shape[dim:]))
        if own is None
        else jnp.moveaxis(x, own, dim)
        for x, own in zip(args[1:count], dims[1:count], strict=True)
    ]
    return [args[0], *bs, *args[count:]], (dims[0], *[dim] * (count - 1), *dims[count:])


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
    a, b, *others = (
        modes if dim is None else modes[:dim] + mode + modes[dim:]
        for modes, dim in zip(contraction.operands, dims, strict=True)
    )
    at = _place(contraction, a, b, mode)
    out = contraction.out[:at] + mode + contraction.out[at:]
    extras = tuple(others[contraction.num_bs - 1 :])
    reduced = tuple("".join(own for own in out if own in modes + mode) for modes in contraction.reduced)
    return dataclasses.replace(contraction, a=a, b=b, out=out, extras=extras, reduced=reduced), at


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
