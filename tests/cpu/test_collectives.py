"""Collective matmul over CPU devices: values and gradients are those of the collective and the product by themselves;
and the program for CUDA lets each transfer run beside a product."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, collectives, partitioned

import jax_bwgemm
from jax_bwgemm import all_gather_matmul, matmul_reduce_scatter
from jax_bwgemm.ops import lowering

F32 = jnp.float32
Fun = Callable[..., Any]
UP = ((P("x"), P(None, "x")), P(None, "x"))  # specs of operands, and of the result, of a gathered product
DOWN = ((P(None, "x"), P("x")), P("x"))


@pytest.fixture(autouse=True)
def _quiet(quiet: None) -> None:
    """The products are XLA's on a CPU."""


def mesh_of(*sizes: int) -> Any:
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def normal(*shapes: tuple[int, ...], dtype: Any = F32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def gathered(a: jax.Array, b: jax.Array, *, dim: int = -2, **settings: Any) -> jax.Array:
    whole = lax.all_gather(a, "x", axis=a.ndim + dim, tiled=True)
    return jax_bwgemm.matmul(whole, b, **settings)


def scattered(a: jax.Array, b: jax.Array, *, dim: int = -2, **settings: Any) -> jax.Array:
    out = jax_bwgemm.matmul(a, b, **settings)
    return lax.psum_scatter(out, "x", scatter_dimension=out.ndim + dim, tiled=True)


def mapped(f: Fun, specs: Any, num: int = 4, **settings: Any) -> Fun:
    return jax.shard_map(f, mesh=mesh_of(num), in_specs=specs[0], out_specs=specs[1], **settings)


def with_gradients(f: Fun, num: int) -> Fun:
    def loss(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = f(*operands)
        return (out.astype(F32) ** 2).sum(), out

    return jax.jit(jax.grad(loss, tuple(range(num)), has_aux=True))


def check(ours: Fun, theirs: Fun, operands: Sequence[jax.Array], rtol: float = 1e-5) -> None:
    """The values and all gradients, their shapes, dtypes and shardings; `rtol` of the largest element."""
    got, want = (jax.tree.leaves(with_gradients(f, len(operands))(*operands)) for f in (ours, theirs))
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) and x.sharding.is_equivalent_to(y.sharding, x.ndim)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max())


@pytest.mark.parametrize("num_chunks", [None, 3])
@pytest.mark.parametrize("num", [1, 2, 8])
def test_rows_that_are_gathered(num: int, num_chunks: int | None) -> None:
    operands = normal((7 * num, 10), (10, 3 * num))
    ours = functools.partial(all_gather_matmul, axis_name="x", num_chunks=num_chunks)
    check(mapped(ours, UP, num), mapped(gathered, UP, num), operands)


@pytest.mark.parametrize("num_chunks", [None, 1, 3])
@pytest.mark.parametrize("num", [1, 2, 8])
def test_rows_that_are_scattered(num: int, num_chunks: int | None) -> None:
    operands = normal((5 * num, 6 * num), (6 * num, 7))
    ours = functools.partial(matmul_reduce_scatter, axis_name="x", num_chunks=num_chunks)
    check(mapped(ours, DOWN, num), mapped(scattered, DOWN, num), operands)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_epilogues(activation: str | None, check_vma: bool) -> None:
    """A scale, a bias, an activation and a residual, each with its gradient."""
    specs = ((*UP[0], P("x"), P(None, "x")), UP[1])

    def of(product: Fun) -> Fun:
        def f(a: jax.Array, b: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
            return product(a, b, alpha=0.5, bias=bias, activation=activation, residual=residual)

        return mapped(f, specs, check_vma=check_vma)

    operands = normal((12, 6), (6, 8), (8,), (12, 8))
    check(of(functools.partial(all_gather_matmul, axis_name="x")), of(gathered), operands)


@pytest.mark.parametrize("dim", [-3, -2, 0, 1])
def test_sequences_of_a_batch(dim: int) -> None:
    """(B, S, D), gathered or scattered along S or B; a dimension may be counted from either end."""
    at = dim % 3
    along = P(*[None] * at, "x")
    x, up, h, down = normal((4, 8, 6), (6, 8), (4, 8, 8), (8, 6))
    specs = ((along, P(None, "x")), P(None, None, "x"))
    ours = functools.partial(all_gather_matmul, axis_name="x", gather_dimension=dim)
    check(mapped(ours, specs), mapped(functools.partial(gathered, dim=at - 3), specs), [x, up])
    specs = ((P(None, None, "x"), P("x")), along)
    ours = functools.partial(matmul_reduce_scatter, axis_name="x", scatter_dimension=dim)
    check(mapped(ours, specs), mapped(functools.partial(scattered, dim=at - 3), specs), [h, down])


def test_vmap() -> None:
    """Stacks of both operands, and of one of them."""
    x, up, h, down = normal((3, 8, 6), (3, 6, 8), (3, 8, 8), (3, 8, 6))
    for ours, theirs, specs, a, b in (
        (all_gather_matmul, gathered, UP, x, up),
        (matmul_reduce_scatter, scattered, DOWN, h, down),
    ):
        for axes, pair in (((0, 0), (a, b)), ((0, None), (a, b[0])), ((None, 0), (a[0], b))):
            stacked = [P(None, *spec) if axis == 0 else spec for axis, spec in zip(axes, specs[0], strict=True)]
            of = (jax.vmap(f, axes) for f in (functools.partial(ours, axis_name="x"), theirs))
            check(*(mapped(f, (tuple(stacked), P(None, *specs[1]))) for f in of), pair)


def test_bfloat16_and_its_partial_sums() -> None:
    """Sums are rounded on their way as often as they travel; on request they are not."""
    a, b = normal((64, 512), (512, 32), dtype=BF16)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)

    def error(f: Fun) -> float:
        out = jax.jit(mapped(f, DOWN, 8))(a, b)
        assert out.dtype == BF16
        return float(np.linalg.norm(np.asarray(out, np.float64) - want) / np.linalg.norm(want))

    ours = functools.partial(matmul_reduce_scatter, axis_name="x")
    rounded = error(ours)
    assert rounded < 2.0**-8
    with jax_bwgemm.config(partial_sums="float32"):
        assert error(ours) < 0.6 * rounded
    check(mapped(ours, DOWN), mapped(scattered, DOWN), (a, b), 2.0**-6)
    check(mapped(functools.partial(all_gather_matmul, axis_name="x"), UP), mapped(gathered, UP), (a, b), 2.0**-6)


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "bfloat16"), ("bfloat16", "float32")])
def test_other_dtypes(dtypes: tuple[str, str]) -> None:
    """Narrow operands, whose gradients are multiplied in the cotangent's dtype; and a wide result."""
    dtype, out_dtype = dtypes
    settings = {"out_dtype": jnp.dtype(out_dtype)}
    rtol = 2.0**-3 if "8" in dtype else 2.0**-6
    for ours, theirs, specs in ((all_gather_matmul, gathered, UP), (matmul_reduce_scatter, scattered, DOWN)):
        of = (functools.partial(f, **settings) for f in (functools.partial(ours, axis_name="x"), theirs))
        check(*(mapped(f, specs) for f in of), normal((16, 32), (32, 16), dtype=dtype), rtol)


def test_float64() -> None:
    with jax.enable_x64(True):
        x, up, down = normal((8, 6), (6, 8), (8, 6), dtype=jnp.float64)
        both = (mlp(*rings()), mlp(gathered, scattered))
        specs = ((P("x"), P(None, "x"), P("x")), P("x"))
        outs = [jax.jit(jax.grad(lambda *z, f=f: mapped(f, specs)(*z).sum(), (0, 1, 2)))(x, up, down) for f in both]
        for got, want in zip(*outs, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_integers() -> None:
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-128, 128, shape), jnp.int8) for shape in ((16, 32), (32, 16)))
    for ours, specs in ((all_gather_matmul, UP), (matmul_reduce_scatter, DOWN)):
        got = jax.jit(mapped(functools.partial(ours, axis_name="x", out_dtype=jnp.int32), specs))(a, b)
        np.testing.assert_array_equal(got, np.asarray(a, np.int64) @ np.asarray(b, np.int64))


@pytest.mark.parametrize("num_chunks", [None, 3])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_rows_in_the_order_of_the_ring(activation: str | None, num_chunks: int | None) -> None:
    """A tuple goes from one to the other, through what is computed of each element; and along S of (B, S, D)."""
    x, up, bias, down = normal((3, 12, 6), (6, 8), (8,), (8, 6))

    def ours(x: jax.Array, up: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
        settings = {"bias": bias, "activation": activation, "num_chunks": num_chunks}
        h = all_gather_matmul(x, up, "x", in_order=False, **settings)
        assert [part.shape for part in h] == [(3, 3, 2)] * 4
        return matmul_reduce_scatter(tuple(map(jnp.sin, h)), down, "x", num_chunks=num_chunks)

    def theirs(x: jax.Array, up: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
        return scattered(jnp.sin(gathered(x, up, bias=bias, activation=activation)), down)

    specs = ((P(None, "x"), P(None, "x"), P("x"), P("x")), P(None, "x"))
    check(*(mapped(f, specs) for f in (ours, theirs)), [x, up, bias, down])


def rings(**settings: Any) -> list[Fun]:
    return [functools.partial(f, axis_name="x", **settings) for f in (all_gather_matmul, matmul_reduce_scatter)]


def mlp(up: Fun, down: Fun) -> Fun:
    return lambda x, w, v: down(up(x, w, activation="gelu"), v)


@pytest.mark.parametrize("axis_names", [{"x", "y"}, {"x"}])
def test_an_mlp_on_a_mesh_of_two_axes(axis_names: set[str]) -> None:
    """A batch over one axis, which may be left to XLA, and the layers over the other; under `checkpoint`, too."""
    batch = P("y") if "y" in axis_names else P()
    specs = (P(*batch or (None,), "x"), P(None, "x"), P("x"))
    ours = mlp(*rings())
    operands = normal((4, 8, 6), (6, 8), (8, 6))
    mesh = mesh_of(4, 2)
    operands[0] = jax.device_put(operands[0], NamedSharding(mesh, P("y", "x")))

    def of(f: Fun) -> Fun:
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=axis_names)

    theirs = of(mlp(gathered, scattered))
    check(of(ours), theirs, operands)
    check(of(jax.checkpoint(ours)), theirs, operands)


def test_gradients_of_gradients() -> None:
    operands = normal((8, 6), (6, 8), (8, 6))
    ours = mlp(*rings())

    def slopes(f: Fun) -> Fun:
        of = mapped(f, ((P("x"), P(None, "x"), P("x")), P("x")))
        return lambda *x: jax.grad(lambda *x: (of(*x) ** 2).sum())(*x)

    check(slopes(ours), slopes(mlp(gathered, scattered)), operands, 1e-4)


REFUSED: dict[str, tuple[Fun, str]] = {
    "an unbound axis": (
        lambda a, b: all_gather_matmul(a, b, "z"),
        "`axis_name` requires a manual axis of a surrounding `jax.shard_map`, got 'z', which is unbound; call",
    ),
    "axes": (
        lambda a, b: all_gather_matmul(a, b, ("x", "y")),
        r"`axis_name` requires one axis, got \('x', 'y'\); make",
    ),
    "the summed dimension": (
        lambda a, b: all_gather_matmul(a, b, "x", gather_dimension=1),
        r"`gather_dimension` requires a dimension of `a` before its last, which is summed, got 1 for \(8, 6\)",
    ),
    "columns": (
        lambda a, b: matmul_reduce_scatter(a, b, "x", scatter_dimension=-1),
        "`scatter_dimension` requires a dimension of `a` before its last.*take the transposed product",
    ),
    "no such dimension": (lambda a, b: matmul_reduce_scatter(a, b, "x", scatter_dimension=-3), "got -3 for"),
    "rows that do not divide": (
        lambda a, b: matmul_reduce_scatter(a[:7], b, "x"),
        r"a size that is a multiple of the 4 devices of 'x', got 7 in \(7, 6\); pad `a` with zeros",
    ),
    "a stack": (lambda a, b: all_gather_matmul(a, b[None], "x"), r"a matrix `b`, got the shape \(1, 6, 8\); map over"),
    "a vector": (lambda a, b: all_gather_matmul(a[0], b, "x"), r"an `a` of rank 2 or more, got the shape \(6,\)"),
    "sizes": (lambda a, b: matmul_reduce_scatter(a, b.T, "x"), "the last dimension of `a` to equal .* got 6 and 8"),
    "chunks": (lambda a, b: all_gather_matmul(a, b, "x", num_chunks=0), "`num_chunks` requires None or a positive"),
    "a flag for chunks": (lambda a, b: all_gather_matmul(a, b, "x", num_chunks=True), "`num_chunks` .*, got True"),
    "half a chunk": (lambda a, b: matmul_reduce_scatter(a, b, "x", num_chunks=0.5), "`num_chunks` .*, got 0.5"),
    "a dimension's text": (
        lambda a, b: all_gather_matmul(a, b, "x", gather_dimension="0"),
        r"`gather_dimension` requires a dimension of `a` before its last, .*, got '0' for \(8, 6\)",
    ),
    "no dimension": (lambda a, b: matmul_reduce_scatter(a, b, "x", scatter_dimension=None), "got None for"),
    "an axis's number": (
        lambda a, b: all_gather_matmul(a, b, 0),
        "`axis_name` requires a manual axis .*, got 0, which",
    ),
    "no parts": (
        lambda a, b: matmul_reduce_scatter((), b, "x"),
        "`a` requires an array, or a tuple of one for each device of the axis, got an empty tuple",
    ),
    "a complex bias": (
        lambda a, b: all_gather_matmul(a, b, "x", bias=1j * b[0]),
        "`bias` requires real numbers for a result of float32, got complex64: pass its real part",
    ),
    "a complex residual": (
        lambda a, b: all_gather_matmul(a, b, "x", residual=1j * jnp.ones((32, 8))),
        "`residual` requires real numbers for a result of float32, got complex64: pass its real part",
    ),
    "a bias": (lambda a, b: all_gather_matmul(a, b, "x", bias=a[0]), r"`bias` requires the shape \(n,\) = \(8,\)"),
    "too few parts": (
        lambda a, b: matmul_reduce_scatter((a, a), b, "x"),
        "`a` requires 4 arrays of one shape and dtype for the devices of 'x', got .*8,6",
    ),
    "a residual of a tuple": (
        lambda a, b: all_gather_matmul(a, b, "x", residual=a @ b, in_order=False)[0],
        "`residual` requires `in_order=True`, got False; add its rows",
    ),
    "a residual": (
        lambda a, b: all_gather_matmul(a, b, "x", residual=a @ b),
        r"`residual` requires the result's shape \(32, 8\), got \(8, 8\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    f, message = REFUSED[name]
    specs = ((P(), P()), P("x"))
    with pytest.raises(ValueError, match=message):
        jax.jit(mapped(f, specs))(*normal((8, 6), (6, 8)))


def test_a_list_is_no_bias() -> None:
    """And no residual: as of `matmul`."""
    for name in ("bias", "residual"):
        f = functools.partial(all_gather_matmul, axis_name="x", **{name: [1.0] * 8})
        with pytest.raises(TypeError, match=f"`{name}` requires an array, got list"):
            jax.jit(mapped(f, ((P(), P()), P("x"))))(*normal((8, 6), (6, 8)))


def test_integers_of_any_kind() -> None:
    """Also NumPy's say a dimension and a number of chunks."""
    operands = normal((16, 6), (6, 8))
    settings = {"gather_dimension": np.int64(0), "num_chunks": np.int64(2)}
    ours = functools.partial(all_gather_matmul, axis_name="x", **settings)
    check(mapped(ours, UP), mapped(gathered, UP), operands)


def test_outside_of_a_shard_map() -> None:
    for f in (all_gather_matmul, matmul_reduce_scatter):
        with pytest.raises(ValueError, match=f"got 'x', which is unbound; call `{f.__name__}` in the function"):
            f(*normal((8, 6), (6, 8)), "x")


def beside(text: str) -> tuple[int, list[list[int]]]:
    """How many kernels a program has; and for each transfer, those that neither wait for it nor it for them, counted in
    each computation from its first."""
    num_kernels, found = 0, []
    for computation in text.split("\n}"):
        waits: dict[str, set[str]] = {}
        kernels, transfers = [], []
        for name, rest in re.findall(r"^\s+(?:ROOT )?(%\S+) = (.*)$", computation, re.MULTILINE):
            operands = [x for x in re.findall(r"%[\w.-]+", rest) if x in waits]
            waits[name] = set(operands).union(*(waits[x] for x in operands))
            kernels += [name] if "jax_bwgemm_matmul_v2" in rest else []
            transfers += [name] if " collective-permute(" in rest else []
        kernels.sort(key=lambda name, waits=waits: len(waits[name]))
        transfers.sort(key=lambda name, waits=waits: len(waits[name]))
        num_kernels += len(kernels)
        found += [[i for i, x in enumerate(kernels) if x not in waits[y] and y not in waits[x]] for y in transfers]
    return num_kernels, found


def lowered(f: Fun, specs: Any, shapes: Sequence[tuple[int, ...]], num: int, directory: Path) -> str:
    mesh = mesh_of(num)
    operands = [
        jax.ShapeDtypeStruct(shape, BF16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs[0], strict=True)
    ]
    return partitioned(f, operands, directory)


@pytest.mark.parametrize(
    ("ours", "specs", "num", "num_chunks", "want"),
    [
        (all_gather_matmul, UP, 2, None, [[0]]),
        (all_gather_matmul, UP, 4, None, [[0], [1], [2]]),
        (all_gather_matmul, UP, 2, 2, [[0, 1], [1, 2]]),
        (matmul_reduce_scatter, DOWN, 2, 1, [[1]]),
        (matmul_reduce_scatter, DOWN, 4, 1, [[1], [2], [3]]),
        (matmul_reduce_scatter, DOWN, 2, None, [[1], [2]]),
        (matmul_reduce_scatter, DOWN, 4, None, [[1], [2], [3], [4], [5], [6]]),
    ],
)
def test_a_transfer_runs_beside_a_kernel(
    ours: Fun, specs: Any, num: int, num_chunks: int | None, want: list[list[int]], artifacts_dir: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And nothing else moves. One kernel a chunk; what a transfer runs beside is settled by what waits for what."""
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])
    f = functools.partial(ours, axis_name="x", num_chunks=num_chunks, device="h200", on_fallback="error")
    text = lowered(mapped(f, specs, num), specs, ((4096, 4096), (4096, 4096)), num, tmp_path)
    assert beside(text) == (num * (num_chunks or (2 if ours is matmul_reduce_scatter else 1)), want)
    assert collectives(text) == ["collective-permute"] * len(want)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_gradients_transfers_run_beside_kernels(
    in_order: bool, artifacts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tensor-parallel MLP: two rings forward and two backward, and a kernel each for the gradients of weights."""
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])
    up, down = rings(device="h200", on_fallback="error")
    ours = mlp(functools.partial(up, in_order=in_order), down)
    specs = ((P("x"), P(None, "x"), P("x")), P("x"))
    num, shapes = 2, ((4096, 1024), (1024, 4096), (4096, 1024))

    def loss(*operands: jax.Array) -> jax.Array:
        return (mapped(ours, specs, num)(*operands).astype(F32) ** 2).sum()

    text = lowered(jax.value_and_grad(loss, (0, 1, 2)), specs, shapes, num, tmp_path)
    assert [x for x in collectives(text) if x != "all-reduce"] == ["collective-permute"] * 6
    num_kernels, found = beside(text)
    assert num_kernels == (2 + 4) + (2 + 1) + (4 + 1) and len(found) == 6 and all(found)
