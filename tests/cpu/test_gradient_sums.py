"""Gradients of weights, summed over batches: the kernel that has one adds it to what there is, in the same place."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_artifacts import fake_entry, layers, write_fake_artifacts
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, collectives, hlo, partitioned, struct
from meshed import compiled

from jax_bwgemm import accelerate, config
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.ops import lowering

F32 = jnp.float32
K, N, S = 2048, 4096, 4096
X, Y = struct(S, K), struct(S, N)
Fun = Callable[..., Any]


@pytest.fixture(autouse=True)
def _kernels_on_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of dense layers, and those that ship for gradients of weights: with float32 results, or that add a part."""
    shipped = (x for x in catalogue(["sm_90a"]) if (x.a_dtype, x.a_major) == ("bfloat16", "m"))
    sums = [x for x in shipped if x.out_dtype == "float32" or x.steps.kind == "scale_residual"]
    (tmp_path / "kernels").mkdir()
    write_fake_artifacts(tmp_path / "kernels", [*layers(), *map(fake_entry, sums)])
    monkeypatch.setenv("JAX_BWGEMM_ARTIFACTS", str(tmp_path / "kernels"))
    with config(device="h200", on_fallback="error"):
        yield


def mlp(w: Any, x: Any) -> Any:
    return jnp.mean((jax.nn.gelu(x @ w["up"] + w["b"]) @ w["down"]).astype(F32) ** 2)


def summed(loss: Fun, dtype: Any) -> Fun:
    """Over the first dimension of the batches."""

    def f(w: Any, batches: Any) -> Any:
        def turn(acc: Any, x: Any) -> Any:
            return jax.tree.map(lambda sum, g: sum + g.astype(dtype), acc, jax.grad(loss)(w, x)), None

        return lax.scan(turn, jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), w), batches)[0]

    return f


def weights(d: int, f: int) -> dict[str, Any]:
    return {"up": struct(d, f), "b": struct(f), "down": struct(f, d)}


def values(tree: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) / 8, x.dtype), tree)


def in_place(text: str) -> list[str]:
    """The variants whose result is stored over an operand."""
    lines = [line for line in text.splitlines() if "@jax_bwgemm_matmul_v2" in line]
    return [calls(line)[0]["variant"] for line in lines if "output_operand_alias<" in line]


@pytest.mark.parametrize("of", [mlp, accelerate(mlp)], ids=["JAX's gradient", "of the accelerated loss"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_sums_are_residuals(dtype: Any, of: Fun) -> None:
    f, args = accelerate(summed(of, dtype)), (weights(2048, 8192), struct(3, 4, 1024, 2048))
    products = f.report(*args).products
    assert [x.epilogue for x in products].count("residual") == 2
    text = hlo(f, *args)
    out = {F32: "f32", BF16: "bf16"}[dtype]
    (up, down) = in_place(text)
    assert all(re.fullmatch(rf"sm_90a_bf16_bf16_{out}_mnn_.*_residual", x) for x in (up, down))
    shape = f"2048x8192x{ {F32: 'f32', BF16: 'bf16'}[dtype] }"
    assert any(f"tensor<{shape}>" in call["types"].split("->")[1] for call in calls(text)), "without a batch"


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_values(dtype: Any) -> None:
    args = values((weights(64, 128), struct(3, 4, 16, 64)))
    with config(on_fallback="ignore"):
        got, want = (jax.jit(f)(*args) for f in (accelerate(summed(mlp, dtype)), summed(mlp, dtype)))
        total = jax.jit(jax.grad(lambda w, x: sum(leaf.sum() for leaf in jax.tree.leaves(summed(mlp, F32)(w, x)))))
        own = accelerate(summed(mlp, F32))
        derived = jax.jit(jax.grad(lambda w, x: sum(leaf.sum() for leaf in jax.tree.leaves(own(w, x)))))
        pairs = [(got, want), (derived(*args), total(*args))]
    for g, w in (pair for trees in pairs for pair in zip(*map(jax.tree.leaves, trees), strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        scale = float(jnp.abs(w.astype(F32)).max())
        np.testing.assert_allclose(g.astype(F32), w.astype(F32), rtol=0, atol=0.02 * scale)


def gradient(x: Any, y: Any) -> Any:
    """As JAX has it, of (S, N) and (S, K): transposed behind the product."""
    return lax.transpose(lax.dot_general(y, x, (((0,), (0,)), ((), ()))), (1, 0))


TRANSPOSED = {
    "alone": (lambda x, y, r: gradient(x, y) + r, ["residual"]),
    "first": (lambda x, y, r: r + gradient(x, y), ["residual"]),
    "of three dimensions": (
        lambda x, y, r: jnp.einsum("bsk,bsn->kn", x.reshape(4, -1, K), y.reshape(4, -1, N)) + r,
        ["residual"],
    ),
    "read before it is transposed": (lambda x, y, r: ((g := gradient(x, y)) + r, g), [None]),
    "read as it was": (
        lambda x, y, r: (lax.transpose(g := lax.dot_general(y, x, (((0,), (0,)), ((), ()))), (1, 0)) + r, g),
        [None],
    ),
    "transposed behind another": (lambda x, y, r: lax.transpose(gradient(x, y).T * 1, (1, 0)) + r, [None]),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_products(name: str) -> None:
    f, epilogues = TRANSPOSED[name]
    args = X, Y, struct(K, N)
    assert [x.epilogue for x in accelerate(f).report(*args).products] == epilogues
    if epilogues == ["residual"]:
        (call,) = calls(hlo(accelerate(f), *args))
        assert call["variant"].endswith("_residual") and call["a_major"] + call["b_major"] == "mn"
    small = values((struct(32, K // 64), struct(32, N // 64), struct(K // 64, N // 64)))
    if name != "of three dimensions":
        small_f = accelerate(f)
        with config(on_fallback="ignore"):
            for got, want in zip(jax.tree.leaves(small_f(*small)), jax.tree.leaves(f(*small)), strict=True):
                np.testing.assert_allclose(got.astype(F32), want.astype(F32), rtol=0, atol=0.05)


def _scanned(turn: Fun) -> Fun:
    return lambda acc, x, y: lax.scan(turn, acc, (x[None], y[None]))


def _looped(acc: Any, x: Any, y: Any) -> Any:
    return lax.fori_loop(0, x.shape[1], lambda i, acc: acc + gradient(x * i.astype(BF16), y), acc)


LOOPS = {
    "scan": (_scanned(lambda acc, xy: (acc + gradient(*xy), None)), 1),
    "loop": (_looped, 1),
    "jitted body": (_scanned(lambda acc, xy: (jax.jit(lambda a: a + gradient(*xy))(acc), None)), 0),
    "read by another, too": (_scanned(lambda acc, xy: (acc + gradient(*xy), acc.sum())), 0),
    "stacked": (_scanned(lambda acc, xy: (acc, acc + gradient(*xy))), 0),
    "no loop": (lambda acc, x, y: acc + gradient(x, y), 0),
}


@pytest.mark.parametrize("name", LOOPS)
def test_only_what_a_loop_carries_on_is_stored_over(name: str) -> None:
    """What else reads it would have XLA copy it, as outside of loops, where it may be an argument."""
    f, num = LOOPS[name]
    assert len(in_place(hlo(accelerate(f), struct(K, N), X, Y))) == num


def test_two_sums_that_change_places() -> None:
    def turn(sums: Any, xy: Any) -> Any:
        return (sums[1] + gradient(*xy), sums[0]), None

    f = _scanned(turn)
    sums = struct(K, N), struct(K, N)
    report = accelerate(f).report(sums, X, Y)
    assert [x.epilogue for x in report.products] == ["residual"]
    assert in_place(hlo(accelerate(f), sums, X, Y)) == []


def test_a_sum_of_more_dimensions_is_copied_by_nobody_before() -> None:
    """The kernel would get it reshaped, of which XLA makes a copy if it is to be stored over."""
    f = _scanned(lambda acc, xy: (acc + jnp.einsum("sk,shd->khd", xy[0], xy[1].reshape(S, 32, -1)), None))
    sums = struct(K, 32, N // 32)
    assert [x.epilogue for x in accelerate(f).report(sums, X, Y).products] == ["residual"]
    assert in_place(hlo(accelerate(f), sums, X, Y)) == []


@pytest.mark.parametrize("is_in_place", [True, False])
def test_xla_copies_no_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_place: bool) -> None:
    """In the loop. A CPU cannot compile what is in it, but has decided by then."""
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])
    if not is_in_place:
        monkeypatch.setattr(sys.modules["jax_bwgemm.accelerate"], "_in_place", lambda *_: {})

    def f(acc: Any, x: Any, y: Any) -> Any:
        return lax.scan(lambda acc, xy: (acc + gradient(*xy).astype(F32), None), acc, (x, y))

    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "copy-insertion"}
    args = struct(K, N, dtype=F32), struct(3, S, K), struct(3, S, N)
    with pytest.raises(Exception, match="No FFI handler registered for jax_bwgemm"):
        jax.jit(accelerate(f)).lower(*args).compile(compiler_options=options)
    (after,) = tmp_path.glob("*after_copy-insertion*")
    (body,) = [x for x in after.read_text().split("\n\n") if "jax_bwgemm_matmul_v2" in x]
    assert (f"f32[{K},{N}]{{1,0}} copy(" in body) == (not is_in_place), body


ROWS = P(), P(None, "x"), P(None, "x")
COLUMNS = P(None, "x"), P(), P(None, None, "x")


@pytest.mark.parametrize("specs, wanted", [(ROWS, ["all-reduce"]), (COLUMNS, [])], ids=["rows", "columns"])
def test_over_a_mesh(specs: Any, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sharded rows, partial products are added over the devices before they are to what there is; of columns, each
    device stores its part over that."""
    monkeypatch.setattr(lowering, "platforms_of", lambda ctx: ["cuda"])
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    shardings = [NamedSharding(mesh, spec) for spec in specs]

    def f(acc: Any, x: Any, y: Any) -> Any:
        return lax.scan(lambda acc, xy: (acc + gradient(*xy).astype(F32), None), acc, (x, y))[0]

    args = values((struct(64, 32, dtype=F32), struct(3, 128, 64), struct(3, 128, 32)))
    with config(on_fallback="ignore"):
        got, found = compiled(accelerate(f), list(map(jax.device_put, args, shardings)))
    np.testing.assert_allclose(got, f(*args), rtol=0, atol=0.05)
    large = struct(K, N, dtype=F32), struct(3, S, K), struct(3, S, N)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own) for x, own in zip(large, shardings, strict=True)]
    text = partitioned(accelerate(f), placed, tmp_path)
    assert found == collectives(text) == wanted
    assert ("output_to_operand_aliasing" in text) == (not wanted)


MEANS = {
    "averaged": lambda acc, x, y: acc + gradient(x, y) / 4,
    "gradient descent": lambda acc, x, y: acc - 1e-3 * gradient(x, y),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_part_of_a_gradient(name: str) -> None:
    turn = MEANS[name]
    f = _scanned(lambda acc, xy: (turn(acc, *xy), None))
    args = struct(K, N), X, Y
    assert [x.epilogue for x in accelerate(f).report(*args).products] == ["scale_residual"]
    (variant,) = in_place(hlo(accelerate(f), *args))
    assert variant.endswith("_scale_residual")


def test_whose_line_it_is() -> None:
    """The user's, not that of the package, which has made the gradient."""
    report = accelerate(summed(accelerate(mlp), F32)).report(weights(2048, 8192), struct(3, 4, 1024, 2048))
    assert all(x.where.startswith("test_gradient_sums.py:") for x in report.products), str(report)
