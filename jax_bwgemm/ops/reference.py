"""What XLA computes where no kernel of ours does: the same values, dtypes and epilogue, from `lax.dot_general`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import ACC, UP, Apply, Const, Epilogue, Input, Node
from jax_bwgemm.facts.problem import FP8_DTYPES, INT8_DTYPES
from jax_bwgemm.ops.precision import for_xla
from jax_bwgemm.ops.shape_rules import matmul_shape, of_rank, reordered

OPS: dict[str, Callable[..., jax.Array]] = {
    "add": lambda x, y: jnp.add(*_alike(x, y)),
    "sub": lambda x, y: jnp.subtract(*_alike(x, y)),
    "mul": lambda x, y: jnp.multiply(*_alike(x, y)),
    "div": lambda x, y: jnp.divide(*_alike(x, y)),
    "max": lambda x, y: jnp.maximum(*_alike(x, y)),
    "min": lambda x, y: jnp.minimum(*_alike(x, y)),
    "neg": jnp.negative,
    "abs": jnp.abs,
    "square": jnp.square,
    "exp": jnp.exp,
    "log": jnp.log,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "erf": lax.erf,
    "gt": lambda x, y: _flag(jnp.greater(*_alike(x, y)), x, y),
    "ge": lambda x, y: _flag(jnp.greater_equal(*_alike(x, y)), x, y),
    "eq": lambda x, y: _flag(jnp.equal(*_alike(x, y)), x, y),
    "where": lambda x, y, z: jnp.where(x != 0, *_alike(y, z)),
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "leaky_relu": jax.nn.leaky_relu,
}  # what the operations of an epilogue mean, and what JAX differentiates


REDUCERS: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "max": jnp.max}


def reference(
    a: jax.Array,
    b: jax.Array,
    *operands: jax.Array,
    contraction: Contraction,
    out_dtype: Any,
    epilogue: Epilogue,
    precision: Any = None,
    out_sharding: Any = None,
    **_: Any,
) -> tuple[jax.Array, ...]:
    """The primitives' results, from their operands and params; of any dtypes, of which sums may be wider."""
    others, operands = operands[: contraction.num_bs - 1], operands[contraction.num_bs - 1 :]
    acc_dtype = jnp.dtype("int32") if str(a.dtype) in INT8_DTYPES else sums_dtype(out_dtype, a.dtype, b.dtype)
    is_plain = epilogue.is_identity and out_dtype in (a.dtype, acc_dtype) and str(out_dtype) not in FP8_DTYPES
    dtype = out_dtype if is_plain else acc_dtype
    sums = tuple(_dot(a, x, contraction, dtype, for_xla(precision), out_sharding) for x in (b, *others))
    axes = contraction.reduced_axes
    return sums if is_plain else finish(sums, epilogue, aligned(operands, contraction), out_dtype, axes)


def by_matmul(
    a: jax.Array,
    bs: Sequence[jax.Array],
    extras: Sequence[jax.Array],
    *,
    out_dtype: Any,
    epilogue: Epilogue,
    precision: Any = None,
    out_sharding: Any = None,
    **_: Any,
) -> jax.Array:
    """As `reference`, of what is not ours, in shapes and dtypes that `jnp.matmul` takes: with each of `bs`, and the
    first result."""
    is_plain = epilogue.is_identity and str(out_dtype) not in FP8_DTYPES
    dtype = out_dtype if is_plain else sums_dtype(out_dtype, a.dtype, bs[0].dtype)
    sharding = of_rank(out_sharding, len(matmul_shape(a.shape, bs[0].shape)))
    sums = [jnp.matmul(a, b, precision=precision, preferred_element_type=dtype, out_sharding=sharding) for b in bs]
    return sums[0] if is_plain else finish(sums, epilogue, extras, out_dtype)[0]


def aligned(operands: Sequence[jax.Array], contraction: Contraction) -> list[jax.Array]:
    """An epilogue's operands, of the result's rank and with its order of modes; those that they lack have size 1."""
    found = []
    for x, modes in zip(operands, contraction.extras, strict=True):
        order = sorted(range(len(modes)), key=lambda i: contraction.out.index(modes[i]))
        x = x if order == sorted(order) else lax.transpose(x, order)
        missing = tuple(i for i, mode in enumerate(contraction.out) if mode not in modes)
        found.append(lax.expand_dims(x, missing) if missing else x)
    return found


def finish(
    sums: Sequence[jax.Array],
    epilogue: Epilogue,
    operands: Sequence[jax.Array],
    out_dtype: Any,
    axes: Sequence[tuple[int, ...]] = (),
) -> tuple[jax.Array, ...]:
    """All results of `epilogue`, in the dtype of the `sums` (of each b) and rounded once, then its reductions, over
    `axes`, in float32. Integer sums become float32 for what is more than an addition. `operands` in its order; they
    broadcast."""
    if jnp.issubdtype(sums[0].dtype, jnp.integer) and not _keeps_integers(epilogue):
        sums = [x.astype(jnp.float32) for x in sums]
    dtype = sums[0].dtype
    known: dict[str, Any] = {x.role: value for x, value in zip(epilogue.operands, operands, strict=True)}
    known = {role: value.astype(dtype) for role, value in known.items()}
    known |= {role: jnp.asarray(value, dtype) for role, value in epilogue.scalars}
    known |= {x.role: acc for x, acc in zip((ACC, UP), sums, strict=False)}
    results = tuple(round_to(evaluate(node, known), out_dtype) for _, node in epilogue.results)
    shape = sums[0].shape
    nodes = (jnp.broadcast_to(evaluate(x.node, known), shape).astype(jnp.float32) for x in epilogue.reductions)
    reduced = zip(epilogue.reductions, nodes, axes, strict=True)
    return *results, *(REDUCERS[x.reducer](node, own) for x, node, own in reduced)


def _keeps_integers(epilogue: Epilogue) -> bool:
    """Whether it is exact in integers: of sums and relu, by no factor but 1."""

    def is_exact(node: Node) -> bool:
        if isinstance(node, Apply):
            return node.op in ("add", "mul", "relu") and all(map(is_exact, node.args))
        return isinstance(node, Input)

    return all(is_exact(node) for _, node in epilogue.results) and all(value == 1.0 for _, value in epilogue.scalars)


def evaluate(node: Node, known: Mapping[str, jax.Array]) -> jax.Array:
    """`node` of inputs by their roles."""
    if isinstance(node, Input):
        return known[node.role]
    if isinstance(node, Const):
        return jnp.asarray(node.value, next((x.dtype for x in known.values()), jnp.float32))  # a slope may be constant
    return OPS[node.op](*(evaluate(arg, known) for arg in node.args))


def _flag(is_true: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return is_true.astype(jnp.result_type(x, y))


def _alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Broadcast in so many words, which `jax.numpy_rank_promotion("raise")` demands; a scalar is left alone."""
    if x.ndim == y.ndim or 0 in (x.ndim, y.ndim):
        return x, y
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    return jnp.broadcast_to(x, shape), jnp.broadcast_to(y, shape)


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in `dtype`. 8-bit floats saturate, infinities too, as the kernels' conversions do; NaN stays NaN."""
    if str(dtype) in FP8_DTYPES:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def sums_dtype(out_dtype: Any, *given: Any) -> Any:
    """In which XLA has the sums of a result that is to be rounded, of operands of the `given` dtypes. Of integers they
    are integers of at least four bytes, which wrap around."""
    if given and all(jnp.issubdtype(dtype, jnp.integer) for dtype in (out_dtype, *given)):
        dtype = jnp.result_type(out_dtype, *given)
        return dtype if dtype.itemsize >= 4 else jnp.dtype("int32")
    return jnp.dtype("float32") if str(out_dtype) in FP8_DTYPES else at_least_float32(out_dtype)


def at_least_float32(dtype: Any) -> Any:
    """Of a wider dtype that one, of a complex one as wide a one; whatever a user lets JAX promote."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def _dot(
    a: jax.Array, b: jax.Array, contraction: Contraction, dtype: Any, precision: Any, out_sharding: Any
) -> jax.Array:
    """The operand of more free modes comes first, of as many that whose modes the result has first: XLA:CPU (jax 0.9 to
    0.12) has no bfloat16 "km,kvn->mvn" with float32 sums, and 0.12 sums "mn,nk->km" in bfloat16, but neither the other
    way round."""
    other = Contraction(contraction.b, contraction.a, contraction.out)
    more = len(contraction.free_b) - len(contraction.free_a)
    if more > 0 or (more == 0 and other.dot_out == other.out != contraction.dot_out):
        a, b, contraction = b, a, other
        precision = precision[::-1] if isinstance(precision, tuple) else precision
    if out_sharding is not None:
        out_sharding = reordered(out_sharding, contraction.out, contraction.dot_out)
    numbers = contraction.dimension_numbers()
    dot = lax.dot_general(a, b, numbers, precision, preferred_element_type=dtype, out_sharding=out_sharding)
    order = [contraction.dot_out.index(mode) for mode in contraction.out]
    return dot if order == sorted(order) else lax.transpose(dot, order)
