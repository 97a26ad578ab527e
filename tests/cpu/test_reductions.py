"""Reductions of a product's epilogue: what a user's function returns beside the result, under every transformation, and
what becomes of the parts that kernels return."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import fake_entry, write_fake_artifacts
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, swapping

from jax_bwgemm import FallbackError, matmul, mlp
from jax_bwgemm.facts.epilogue import ACC, Apply, Epilogue, Reduction
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.ops import choices, lowering
from jax_bwgemm.ops.reference import finish
from jax_bwgemm.planner.routes import Route
from jax_bwgemm.runtime import decision
from jax_bwgemm.runtime.launch import request
from jax_bwgemm.runtime.rungs import Attempt

F32, E4M3 = jnp.float32, jnp.float8_e4m3fn
Fun = Callable[..., Any]


def random(*shape: int, dtype: Any = F32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, W, BIAS = random(24, 16), random(16, 8, seed=1), random(8, seed=2)
STACK = random(3, 24, 16, seed=3)


def squares(acc: Any, bias: Any) -> Any:
    y = jax.nn.relu(acc + bias)
    return y, jnp.sum(y * y, -1), jnp.sum(y, axis=-2)


FUNCTIONS: dict[str, tuple[Fun, tuple[Any, ...]]] = {
    "sums": (squares, (BIAS,)),
    "largest": (lambda acc: (acc, jnp.max(jnp.abs(acc), axis=-2), jnp.max(acc, -1)), ()),
    "of all": (lambda acc: (jnp.tanh(acc), jnp.sum(acc), jnp.max(jnp.abs(acc))), ()),
    "kept dimensions": (lambda acc: (acc, acc.sum(-1, keepdims=True), acc.max(-2, keepdims=True)), ()),
    "a tree": (lambda acc: {"sum": acc.sum(-2), "out": 2.0 * acc, "more": [acc.max(-1), jnp.abs(acc)]}, ()),
    "what is made of them": (lambda acc: (acc, acc.mean(-1), jnp.sqrt(jnp.sum(acc * acc, -1)) + 1, acc.sum() / 2), ()),
    "with a vector": (lambda acc, bias: (acc, (acc * bias).sum(-1), acc.sum(-2) * bias), (BIAS,)),
    "of one after another": (lambda acc: (acc, acc.sum(-1).max(-1)), ()),
}
LARGEST = ("largest", "of all", "kept dimensions", "a tree", "of one after another")


def ours(f: Fun) -> Fun:
    return lambda a, b, *operands: matmul(
        a, b, epilogue=f, operands=operands, on_fallback="ignore", precision="highest"
    )


def plain(f: Fun) -> Fun:
    """The same of JAX; what has the product's shape in its dtype."""

    def run(a: Any, b: Any, *operands: Any) -> Any:
        acc = jnp.matmul(a, b, preferred_element_type=F32, precision="highest")
        found = f(acc, *(x.astype(F32) for x in operands))
        return jax.tree.map(lambda x: x.astype(jnp.result_type(a, b)) if x.shape == acc.shape else x, found)

    return run


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * max(1.0, np.abs(w).max()))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    """Reduced by the product, and by nothing behind it."""
    f, operands = FUNCTIONS[name]
    for a in (X, STACK):
        for args in ((a, W, *operands), [x.astype(BF16) for x in (a, W, *operands)]):
            want = plain(f)(*args)
            close(ours(f)(*args), want)
            close(jax.jit(ours(f))(*args), want)
    text = str(jax.make_jaxpr(lambda *x: matmul(*x[:2], epilogue=f, operands=x[2:]))(X, W, *operands))
    outside = re.findall(r" = (reduce_\w+)", text)
    assert "bwgemm_fused_matmul" in text and outside == ["reduce_max"] * (name == "of one after another")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("axes", [0, (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_over_a_batch(axes: Any) -> None:
    def f(acc: Any) -> Any:
        return acc, acc.sum(axes), acc.max(axes, keepdims=True)

    batches = random(3, 16, 8, seed=4)
    for args in ((STACK, W), (STACK, batches), (X, batches)):
        close(ours(f)(*args), plain(f)(*args))


@pytest.mark.usefixtures("quiet")
def test_vectors() -> None:
    def f(acc: Any) -> Any:
        return acc, acc.sum(-1), acc.max()

    for args in ((X, W[:, 0]), (X[0], W), (X[0], random(3, 16, 8))):
        close(ours(f)(*args), plain(f)(*args))


def test_a_row_is_what_it_is_of_many_rows() -> None:
    """Its sum has the shape of the result, and float32."""
    row, column = random(1, 16, dtype=BF16), random(16, 1, dtype=BF16)
    for a, b, axis in ((row, W.astype(BF16), -2), (X.astype(BF16), column, -1)):
        for name in ("ignore", "highest"):  # the latter of no kernel's dtypes
            precision = None if name == "ignore" else name
            out, total = matmul(
                a, b, epilogue=lambda acc, axis=axis: (acc, acc.sum(axis, keepdims=True)), precision=precision,
                on_fallback="ignore",
            )  # fmt: skip
            assert out.shape == total.shape and (out.dtype, total.dtype) == (BF16, F32)


def scalar(f: Fun) -> Fun:
    """A loss of all results, each with weights of its own."""

    def run(*args: Any) -> Any:
        leaves = jax.tree.leaves(f(*args))
        return sum((jnp.sin(1 + jnp.arange(x.size)).reshape(x.shape) * x).sum() for x in leaves)

    return run


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("a", [X, STACK], ids=["matrix", "stack"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name: str, a: jax.Array) -> None:
    """In both modes, of what is kept computed again too, and twice."""
    f, operands = FUNCTIONS[name]
    args, every = (a, W, *operands), tuple(range(2 + len(operands)))
    dots = tuple(jnp.cos(x) for x in args)
    close(jax.jvp(ours(f), args, dots), jax.jvp(plain(f), args, dots), 1e-4)
    want = jax.grad(scalar(plain(f)), every)(*args)
    close(jax.grad(scalar(ours(f)), every)(*args), want, 1e-4)
    close(jax.jit(jax.grad(scalar(jax.checkpoint(ours(f))), every))(*args), want, 1e-4)
    twice = [jax.jvp(jax.grad(scalar(g(f)), every), args, dots)[1] for g in (ours, plain)]
    close(*twice, 1e-3)


@pytest.mark.long
@pytest.mark.usefixtures("quiet")
def test_gradients_in_float64() -> None:
    """Of each function as JAX has it there: XLA's own, of the whole of it."""
    with jax.enable_x64(True):
        for name, (f, operands) in FUNCTIONS.items():
            args = [x.astype(jnp.float64) for x in (X, W, *operands)]

            def want(*x: Any, f: Fun = f) -> Any:
                return f(x[0] @ x[1], *x[2:])

            every = tuple(range(len(args)))
            close(ours(f)(*args), want(*args), 1e-13)
            close(jax.grad(scalar(ours(f)), every)(*args), jax.grad(scalar(want), every)(*args), 1e-13)
            narrow = jax.grad(scalar(ours(f)), every)(*(x.astype(F32) for x in args))
            wide = [x.astype(F32) for x in jax.grad(scalar(want), every)(*args)]
            close(list(narrow), wide, 1e-4), name


@pytest.mark.long
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap(name: str) -> None:
    """Over each operand alone and over all, in any place, and of gradients."""
    f, operands = FUNCTIONS[name]
    args = (X, W, *operands)
    every = tuple(range(len(args)))
    for mapped in ((i,) for i in every), (every,):
        for own in mapped:
            for place in (0, -1):
                axes = tuple(place if i in own else None for i in every)
                stacked = [jnp.stack([x, 2 * x, -x], place) if i in own else x for i, x in enumerate(args)]
                close(*(jax.vmap(g(f), axes)(*stacked) for g in (ours, plain)), 1e-4)
    stacked = [jnp.stack([x, 2 * x]) for x in args]
    close(*(jax.vmap(jax.grad(scalar(g(f)), every))(*stacked) for g in (ours, plain)), 1e-4)


@pytest.mark.usefixtures("quiet")
def test_a_float8_result_with_its_scale_and_largest_value() -> None:
    """The scale is known when it is traced, or a number on the device: float32, which no float8 could hold."""
    x, w = X.astype(E4M3), W.astype(E4M3)

    def scaled(acc: Any, scale: Any) -> Any:
        return acc * scale, jnp.max(jnp.abs(acc))

    acc = jnp.matmul(x, w, preferred_element_type=F32)
    known = matmul(x, w, out_dtype=E4M3, epilogue=scaled, operands=(100.0,))
    text = str(jax.make_jaxpr(lambda x, w: matmul(x, w, out_dtype=E4M3, epilogue=scaled, operands=(100.0,)))(x, w))
    assert "reduce_max" not in text and known[0].dtype == E4M3 and float(jnp.abs(known[0].astype(F32)).max()) == 448
    close(known, (jnp.clip(acc * 100, -448, 448).astype(E4M3), jnp.abs(acc).max()))
    close(jax.jit(lambda s: matmul(x, w, out_dtype=E4M3, epilogue=scaled, operands=(s,)))(100.0), known)
    made = str(jax.make_jaxpr(lambda s: matmul(x, w, out_dtype=E4M3, epilogue=scaled, operands=(s,)))(F32(100.0)))
    assert "factor" in made and "reduce_max" not in made and "f8_e4m3fn[]" not in made


REFUSED = {
    "softmax": (lambda acc: jax.nn.softmax(acc), "pointwise in the sums, got `reduce_max`: apply that to the result"),
    "centred": (lambda acc: acc - acc.mean(-1, keepdims=True), "got `reduce_sum`"),
    "least": (lambda acc: (acc, acc.min(-1)), "got `reduce_min`"),
    "product": (lambda acc: (acc, acc.prod(-1)), "got `reduce_prod`"),
    "place": (lambda acc: (acc, acc.argmax(-1)), "got `argmax`"),
    "all": (lambda acc: (acc, (acc > 0).all()), "got `reduce_and`"),
    "running": (lambda acc: (acc, jnp.cumsum(acc, 0).max(0)), "got `cumsum`"),
    "alone": (lambda acc: acc.sum(-1), r"returns an array of shape \(24, 8\), got float32\[24\]"),
    "nothing": (lambda acc: (), r"returns an array of shape \(24, 8\), got \(\)"),
    "elsewhere": (lambda acc: (acc, BIAS.sum()), r"made of the sums, got float32\[\] as result\[1\], which is not"),
    "a number": (
        lambda acc: {"y": acc, "z": 1.0},
        r"got float32\[\] as result\['z'\], which is not: compute it outside",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    f, message = REFUSED[name]
    for x in (X, X.astype(jnp.float16)):
        with pytest.raises(ValueError, match=f"`epilogue` requires .*{message}"):
            matmul(x, W.astype(x.dtype), epilogue=f, on_fallback="ignore")


@pytest.mark.usefixtures("quiet")
def test_what_kernels_cannot_reduce_is_xlas() -> None:
    """Flags are counted as integers; what has no operation has none in a reduction either."""
    for f, reason in (
        (lambda acc: (acc, (acc > 0).sum(-1)), "from bool to int32"),
        (lambda acc: (acc, jnp.cos(acc).sum(-1)), "`cos` is no operation"),
    ):
        with pytest.raises(FallbackError, match=reason):
            matmul(X, W, epilogue=f, on_fallback="error")
        close(ours(f)(X, W), plain(f)(X, W))


# --- over meshes


def divided(f: Fun, operands: Sequence[jax.Array]) -> tuple[Any, str]:
    """By the rule for CUDA, on this CPU: what it returns, and the partitioned program. XLA has the local products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])
        patch.setattr(lowering, "expected", lambda asked: Attempt(Route(asked.problem), is_missing=True))
        patch.setattr(choices, "choose", lambda asked, _: Attempt(Route(asked.problem), reason="this is a CPU"))
        program = jax.jit(lambda *x: f(*x)).lower(*operands).compile()
    return program(*operands), program.as_text()


def reducing(a: Any, b: Any) -> Any:
    def f(acc: Any) -> Any:
        y = jax.nn.relu(acc)
        return y, y.sum(-1), acc.max(-2), jnp.abs(acc).max()

    return matmul(a, b, epilogue=f, device="h200", on_fallback="ignore")


SPECS = [(P("x"), P()), (P(), P(None, "y")), (P("x"), P(None, "y")), (P(None, "x"), P("x")), (P("y", "x"), P("x")),
         (P(("x", "y")), P())]  # fmt: skip


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_over_a_mesh(artifacts_dir: Path, axis_type: AxisType, specs: Sequence[P]) -> None:
    """Each device reduces its part, and vectors are what they add; with a sharded sum XLA reduces what was added."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    a, b = jnp.round(2 * random(64, 32, dtype=BF16)), jnp.round(2 * random(32, 16, dtype=BF16, seed=1))
    want = reducing(a, b)
    own = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b), specs, strict=True)]
    with jax.set_mesh(mesh):
        if axis_type == AxisType.Explicit and specs[0][-1:] == specs[1][:1] != ():
            return  # ambiguous, for `jnp.matmul` too
        got, text = divided(reducing, own)
    close(jax.tree.map(np.asarray, got), want)
    if axis_type == AxisType.Explicit:
        out = got[0].sharding.spec
        assert [tuple(x.sharding.spec) for x in got[1:]] == [(out[0],), (out[1],), ()]
    assert "all-gather" not in text or axis_type == AxisType.Explicit
    gradients = [jax.grad(scalar(f), (0, 1)) for f in (reducing, plain(lambda acc: reducing_of(acc)))]
    with jax.set_mesh(mesh):
        grads, _ = divided(gradients[0], own)
    close([np.asarray(x) for x in grads], list(gradients[1](a, b)), 0.02)


def reducing_of(acc: Any) -> Any:
    y = jax.nn.relu(acc)
    return y, y.sum(-1), acc.max(-2), jnp.abs(acc).max()


def test_shards_of_unequal_sizes(artifacts_dir: Path) -> None:
    """What they are filled up with is not reduced."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a, b = jnp.round(2 * random(30, 32, dtype=BF16)), jnp.round(2 * random(32, 18, dtype=BF16, seed=1))

    def f(a: Any, b: Any) -> Any:
        a = jax.lax.with_sharding_constraint(a + 1, NamedSharding(mesh, P("x")))
        b = jax.lax.with_sharding_constraint(b + 1, NamedSharding(mesh, P(None, "x")))
        found = reducing(a, b), matmul(a, b, epilogue=lambda acc: (acc, (acc + 1).sum(0)), on_fallback="ignore")
        return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, P()))  # JAX 0.9.2 returns no unequal shards

    want = reducing(a + 1, b + 1)
    got, _ = divided(f, (a, b))
    close(got[0], want)
    acc = jnp.matmul(a + 1, b + 1, preferred_element_type=F32)
    close(got[1], (acc.astype(BF16), (acc + 1).sum(0)))


@pytest.mark.usefixtures("quiet")
def test_in_a_shard_map() -> None:
    """A device reduces what it has; the rest is the user's."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f, operands = FUNCTIONS["sums"]

    def whole(*args: Any) -> Any:
        out, rows, columns = ours(f)(*args)
        return out, rows, jax.lax.psum(columns, "x")

    specs = P("x"), P(), P()
    run = jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=(P("x"), P("x"), P()))
    args = X, W, *operands
    close(jax.jit(run)(*args), plain(f)(*args))
    close(*(jax.jit(jax.grad(scalar(g), (0, 1, 2)))(*args) for g in (run, plain(f))), 1e-4)


# --- kernels


R, C = 16, 32  # of the fake kernel's own parts


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Lowered for an H200 that has `EPILOGUES`, by kernels that XLA stands in for; which of them ran."""
    ran: list[Any] = []
    majors = ("kn", "kk", "mn", "mk")
    epilogues = [*EPILOGUES, *(x.transposed for x in EPILOGUES), Epilogue()]
    fields = [(epilogue, own, c_major) for epilogue in epilogues for own in majors for c_major in "nm"]
    variants = [
        Variant("sm_90a", "bfloat16", "bfloat16", dtype, own[0], own[1], Tile(64, 128), x.out, c_major,
                seconds=x.seconds, reductions=x.reductions)
        for x, own, c_major in fields
        for dtype in ("bfloat16", "float32")
    ]  # fmt: skip
    write_fake_artifacts(tmp_path, [fake_entry(variant) for variant in dict.fromkeys(variants)])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path))
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])

    def emit(ctx: Any, operands: Sequence[Any], chosen: Any, aliases: Any) -> Any:
        problem = chosen.plan.problem
        ran.append(problem)
        asked = request(chosen.plan, chosen.entry).results
        assert [x.shape for x in asked[: len(ctx.avals_out)]] == [x.shape for x in ctx.avals_out]
        return mlir.lower_fun(lambda *x: kernel(problem, ctx.avals_out, *x), multiple_results=True)(ctx, *operands)

    monkeypatch.setattr(lowering, "_custom_call", emit)
    yield ran


def kernel(problem: Any, results: Sequence[Any], a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """What one returns: matrices as it stores them, and parts, of uneven numbers of rows or columns."""
    a = a if problem.a_major == "k" else a.swapaxes(1, 2)
    b = b if problem.b_major == "n" else b.swapaxes(1, 2)
    acc = jnp.matmul(a[:, : problem.m, : problem.k], b[:, : problem.k, : problem.n], preferred_element_type=F32)
    epilogue = problem.epilogue
    plain = dataclasses.replace(epilogue, reductions=())
    found = [x if problem.c_major == "n" else x.swapaxes(1, 2) for x in finish((acc,), plain, (), results[0].dtype)]
    for x, aval in zip(epilogue.reductions, results[len(found) :], strict=True):
        axis = 1 if x.place == "n" else 2
        node = finish((acc,), Epilogue(x.node, tuple(s for s in epilogue.scalars)), (), F32)[0]
        ends = np.minimum(np.arange(aval.shape[1] + 1) * -(-node.shape[axis] // aval.shape[1]), node.shape[axis])
        parts = [jnp.take(node, np.arange(i, j), axis) for i, j in zip(ends, ends[1:], strict=False)]
        worst = -jnp.inf if x.reducer == "max" else 0.0
        made = [getattr(part, x.reducer)(axis, initial=worst) for part in parts]
        found.append(jnp.stack(made, 1))
    return found


RELU = Apply("relu", (ACC,))
BOTH = Epilogue(
    RELU,
    reductions=(Reduction("reduced_a", "sum", "n", RELU), Reduction("reduced_b", "max", "m", Apply("abs", (ACC,)))),
)
EPILOGUES = [BOTH]


def both(acc: Any) -> Any:
    y = jax.nn.relu(acc)
    return y, y.sum(-2), jnp.abs(acc).max(-1)


def whole(acc: Any) -> Any:
    """Both dimensions: a kernel reduces one, XLA the other."""
    y = jax.nn.relu(acc)
    return y, y.sum(-2, keepdims=True), jnp.abs(acc).max((-2, -1))


def large(*shape: int, seed: int = 0) -> jax.Array:
    return random(*shape, dtype=BF16, seed=seed)


@pytest.mark.parametrize("f", [both, whole])
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize(
    "shapes", [((520, 264), (264, 272)), ((2, 264, 200), (2, 200, 520)), ((3, 200, 200), (200, 264))]
)
def test_parts_are_finished(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch, shapes: Any, swaps: bool, f: Fun
) -> None:
    """Of products, batches and swapped ones: one kernel, whose parts XLA reduces. A stack of rows that keeps its own
    columns' sums is a batch."""
    if swaps:
        monkeypatch.setattr(decision, "plan", swapping)
    args = large(*shapes[0]), large(*shapes[1], seed=1)
    got = jax.jit(lambda a, b: matmul(a, b, epilogue=f, device="h200", on_fallback="error"))(*args)
    close(got, plain(f)(*args), 0.01)
    (problem,) = kernels
    assert len(problem.epilogue.reductions) == 2 and (problem.c_major == "m") == swaps


def test_mapped_parts(kernels: list[Any]) -> None:
    """Wherever the mode that is mapped comes to stand."""
    stack, weights = large(3, 264, 200), large(200, 520, seed=1)
    for axes, args in (((0, None), (stack, weights)), ((None, 0), (stack[0], jnp.stack([weights, -weights])))):
        run = jax.vmap(lambda a, b: matmul(a, b, epilogue=both, device="h200", on_fallback="error"), axes)
        close(jax.jit(run)(*args), jax.vmap(plain(both), axes)(*args), 0.01)
    assert [len(problem.epilogue.reductions) for problem in kernels] == [2, 2]


def test_what_no_kernel_reduces(kernels: list[Any]) -> None:
    """Over a batch alone: a kernel has the product, and XLA all that follows."""

    def f(acc: Any) -> Any:
        return jax.nn.relu(acc), acc.sum(0)

    args = large(3, 264, 200), large(200, 520, seed=1)
    got = jax.jit(lambda a, b: matmul(a, b, epilogue=f, device="h200", on_fallback="error"))(*args)
    close(got, plain(f)(*args), 0.01)
    (problem,) = kernels
    assert problem.epilogue.is_identity and problem.out_dtype == "float32"


def test_biases_of_an_mlp_are_reduced_where_their_cotangents_are_made() -> None:
    """In float32, and no pass over them is left."""
    x, up, down, bias = random(4, 8, 16), random(16, 24), random(24, 16), random(24)

    def loss(bias: Any, x: Any) -> Any:
        return mlp(x, up, down, bias_in=bias, on_fallback="ignore")[0, 0, 0]

    text = str(jax.make_jaxpr(jax.grad(loss))(bias, x))
    assert text.count("reducer='sum'") == 1 and "reduce_sum" not in text
