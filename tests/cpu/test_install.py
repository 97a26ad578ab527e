"""`install`: what `lax.dot_general` becomes for CUDA, and that nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BF16, calls, hlo, majors, struct

import jax_bwgemm
from jax_bwgemm.bench import models
from jax_bwgemm.ops import lowering, takeover
from jax_bwgemm.runtime.config import _override, config

F32 = jnp.float32
pytestmark = pytest.mark.usefixtures("artifacts_dir")


@pytest.fixture(autouse=True)
def _h200(artifacts_dir: Path) -> Iterator[None]:
    """Planned for, and by a fallback that would raise: products that stay XLA's are none."""
    with config(device="h200", on_fallback="error"):
        yield
        jax_bwgemm.uninstall()


def lowered(f: Callable[..., Any], *operands: Any) -> str:
    with jax_bwgemm.installed():
        return hlo(f, *operands)


def live(text: str) -> list[str]:
    """The lines of our custom calls on which the result depends, of a module of one function."""
    lines = [line for line in text.splitlines() if re.match(r"\s+(%\w+(:\d)? = |return )", line)]
    read: set[str] = set()
    found = []
    for line in reversed(lines):
        name, _, rest = line.partition(" = ") if " = " in line.partition("stablehlo")[0] else ("", "", line)
        if name and name.strip().partition(":")[0] not in read:
            continue
        read |= set(re.findall(r"%\w+", rest))
        found += [line] if "@jax_bwgemm_matmul_v2" in line else []
    return found


MLP = struct(4096, 1024), struct(1024, 4096), struct(4096, 1024)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ up) @ down


def gradient(f: Callable[..., Any], num: int) -> Callable[..., Any]:
    return jax.grad(lambda *x: f(*x).astype(F32).sum(), tuple(range(num)))


def test_products_are_ours_in_the_block_alone() -> None:
    before = hlo(mlp, *MLP)
    assert (len(calls(before)), before.count("dot_general")) == (0, 2)
    text = lowered(mlp, *MLP)
    assert (len(calls(text)), text.count("dot_general")) == (2, 0)
    assert hlo(mlp, *MLP) == before


def test_a_jitted_function_is_compiled_anew_for_a_block_and_after_install() -> None:
    f = jax.jit(mlp)

    def num() -> int:
        return len(calls(f.trace(*MLP).lower(lowering_platforms=("cuda",)).as_text()))

    assert num() == 0
    with jax_bwgemm.installed():
        assert num() == 2
    assert num() == 0
    jax_bwgemm.install()
    jax_bwgemm.install()  # does nothing
    assert num() == 2
    with jax_bwgemm.installed():
        assert num() == 2
    jax_bwgemm.uninstall()
    assert num() == 0
    jax_bwgemm.uninstall()


def test_install_forgets_what_was_compiled() -> None:
    """On this CPU nothing changes but the number of traces."""
    traces = []

    def f(x: jax.Array) -> jax.Array:
        traces.append(x)
        return x @ x

    jitted, x = jax.jit(f), jnp.ones((8, 8), BF16)
    want = jitted(x)
    jitted(x)
    assert len(traces) == 1
    jax_bwgemm.install()
    np.testing.assert_array_equal(jitted(x), want)
    assert len(traces) == 2


def test_a_gradient_moves_no_weight() -> None:
    """JAX makes a weight's gradient transposed; here it is the product stored the other way round, in one pass."""
    text = lowered(gradient(mlp, 3), *MLP)
    assert "stablehlo.transpose" not in text and "dot_general" not in text
    made = [re.findall(r"-> \(?tensor<1x(\d+x\d+)", line)[0] for line in live(text)]
    assert sorted(made) == sorted(["4096x4096"] * 2 + ["4096x1024", "4096x1024", "1024x4096"])


def test_a_gradient_of_a_weight_of_several_dimensions() -> None:
    """(batch, length, width) @ (width, heads, size): the gradient is stored as the weight is."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,dhk->bshk", x, w)

    text = lowered(gradient(f, 2), struct(4, 1024, 1024), struct(1024, 16, 64))
    assert "stablehlo.transpose" not in text and "dot_general" not in text


def test_a_transpose_that_is_no_gradients_stays_one() -> None:
    """The product may be read elsewhere, too: it is computed once."""
    text = lowered(lambda x, w: ((x @ w), (x @ w).T), *MLP[:2])
    assert text.count("stablehlo.transpose") == 1
    assert len(calls(text)) == 2  # as in the function


def test_operands_are_read_from_before_their_transposes() -> None:
    text = lowered(lambda x, w: x @ w.T, struct(1024, 2048), struct(4096, 2048))
    assert majors(text) == ["kk"]


@pytest.mark.parametrize(
    "f, operands",
    [
        (
            lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=a.dtype),
            ("float8_e4m3fn",),
        ),
        (lambda a, b: jnp.matmul(a, b, precision="highest"), ("float32",)),
        (jnp.matmul, ("float64",)),
        (jnp.matmul, ("complex64",)),
        (jnp.matmul, ("int8",)),  # wraps around
        (jnp.matmul, ("bool",)),
    ],
    ids=["float8 that overflows", "highest", "float64", "complex", "int8", "bool"],
)
def test_what_stays_xlas_does_so_silently(f: Any, operands: Any) -> None:
    with jax.enable_x64(operands == ("float64",)):
        x = struct(512, 512, dtype=operands[0])
        text = lowered(f, x, x)
    assert not calls(text) and text.count("dot_general") == 1


def test_what_would_have_to_be_moved_stays_xlas() -> None:
    """Attention's scores of (batch, length, heads, size): a producer may be made to lie as XLA's product wants it."""
    x = struct(4, 1024, 16, 128)
    text = lowered(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), x, x)
    assert not calls(text) and text.count("dot_general") == 1
    y = struct(4, 16, 1024, 128)
    assert len(calls(lowered(lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k), y, y))) == 1


def test_a_block_of_a_transformer() -> None:
    """All products with weights, forward and backward; scores and what follows them stay XLA's."""
    block = models.Block(attention="einsum")
    weights = {name: struct(*shape) for name, shape in block.shapes().items()}
    text = lowered(lambda w, x: models.step(block, w, x), weights, struct(4, 2048, 4096))
    # All but the gradients in x of q, k and v, whose input nobody differentiates; and one product of the scores.
    assert len(live(text)) == 3 * len(weights) - 3 + 1
    dims = [tuple(map(int, x.split("x"))) for x in re.findall(r"transpose .*-> tensor<([\dx]+)xbf16>", text)]
    assert all(len(shape) == 4 for shape in dims)  # of attention, no weight


@pytest.mark.parametrize("module", ["dense", "attention"])
def test_flax_needs_no_edit(module: str) -> None:
    nn = pytest.importorskip("flax.linen")
    layers = {
        "dense": nn.Dense(1024, dtype=BF16),
        "attention": nn.MultiHeadDotProductAttention(num_heads=8, qkv_features=1024, dtype=BF16),
    }
    layer, x = layers[module], struct(8, 512, 1024)
    params = jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype)))
    text = lowered(jax.grad(lambda p, x: layer.apply(p, x).astype(F32).sum(), (0, 1)), params, x)
    assert len(calls(text)) >= (3 if module == "dense" else 12)


def test_the_primitive_is_jaxs() -> None:
    """So are checkpoint policies and cost analysis."""
    x, up, down = MLP
    policy = jax.checkpoint_policies.dots_saveable

    def f(*operands: jax.Array) -> jax.Array:
        return jax.checkpoint(mlp, policy=policy)(*operands).astype(F32).sum()

    with jax_bwgemm.installed():
        jaxpr = jax.make_jaxpr(jax.grad(f, (1, 2)))(x, up, down)
        assert str(jaxpr).count("dot_general[") == 5  # two forward, three backward and none again
        cost = jax.jit(mlp).lower(x, up, down).cost_analysis()
    assert cost["flops"] >= 4 * 4096 * 1024 * 4096


def test_values_on_other_platforms_are_jaxs() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)), BF16)
    want = jax.jit(lambda x: (x @ x.T).T)(x)
    with jax_bwgemm.installed():
        np.testing.assert_array_equal(jax.jit(lambda x: (x @ x.T).T)(x), want)
        np.testing.assert_array_equal((x @ x.T).T, want)


def test_a_module_for_several_platforms_is_jaxs() -> None:
    with jax_bwgemm.installed():
        text = jax.jit(lambda *x: mlp(*x)).trace(*MLP).lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert not calls(text) and text.count("dot_general") >= 2


def divided(f: Callable[..., Any], mesh: Any, specs: Sequence[P], monkeypatch: pytest.MonkeyPatch) -> str:
    """An MLP's function over a mesh of CPUs, lowered as for CUDA."""
    for module in (lowering, takeover):
        monkeypatch.setattr(module, "platforms_of", lambda ctx: ["cuda"])
    operands = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)) for x, s in zip(MLP, specs, strict=True)
    ]
    with jax_bwgemm.installed(), jax.set_mesh(mesh):
        return jax.jit(lambda *x: f(*x)).lower(*operands).as_text()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("specs", [(P("x"), P(None, "y"), P("y")), (P("x"), P(), P())], ids=["tensors", "data"])
def test_a_mesh(specs: Sequence[P], axis_type: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As our own products are divided; explicit axes as JAX has typed them, where a sum over some is the result's."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        out_sharding = P("x") if axis_type is AxisType.Explicit else None
        return jnp.matmul(jax.nn.relu(x @ up), down, out_sharding=out_sharding)

    for of, num in ((f, 2), (gradient(f, 3), 6 - 1)):  # whose result nobody reads
        text = divided(of, mesh, specs, monkeypatch)
        assert text.count("CustomSPMDPartitioning") == num and "dot_general" not in text


def test_sums_over_a_mesh_that_are_put_off_stay_jaxs(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return mlp(x, *(jax.sharding.reshard(w, P(None, None, reduced={"x"})) for w in (up, down)))

    for of, num in ((f, 2), (gradient(f, 3), 5)):
        text = divided(of, mesh, (P("x"), P(), P()), monkeypatch)
        assert "CustomSPMDPartitioning" not in text and text.count("stablehlo.dot_general") == num


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_one_device(axis_type: AxisType) -> None:
    """As without one: nothing is divided."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axis_type,))
    with jax.set_mesh(mesh), jax_bwgemm.installed():
        specs = P("x"), P(None, "x"), P("x")
        operands = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, P() if axis_type is AxisType.Explicit else s)
            )
            for x, s in zip(MLP, specs, strict=True)
        ]
        text = hlo(gradient(mlp, 3), *operands)
        assert len(calls(text)) == 5 + 2 and "stablehlo.transpose" not in text  # two that nobody reads
        text = hlo(lambda *x: jax_bwgemm.matmul(*x, on_fallback="error"), *operands[:2])
        assert len(calls(text)) == 1


def test_emulate_is_not_for_whole_models() -> None:
    with config(emulate="sm_90a"):
        assert not calls(lowered(mlp, *MLP))


def test_a_jax_without_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.interpreters import mlir

    monkeypatch.setattr(takeover, "_rules", {})
    monkeypatch.delattr(mlir, "_platform_specific_lowerings")
    for install in (jax_bwgemm.install, lambda: jax_bwgemm.installed().__enter__()):
        with pytest.raises(RuntimeError, match=f"as jax 0.9.2 to 0.12 have them, got jax {jax.__version__}: pass"):
            install()


def test_a_wrong_environment_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "H200")
    for install in (jax_bwgemm.install, lambda: jax_bwgemm.installed().__enter__()):
        with (
            _override(None),
            pytest.raises(ValueError, match="`device` requires .*, got 'H200': pass 'h200', from"),
        ):
            install()
        assert not takeover.is_on()


def test_explain_says_which_bits_are_asked_for() -> None:
    x = struct(512, 512)
    jax_bwgemm.install(deterministic="batch")
    found = jax_bwgemm.explain(jnp.matmul, x, x)
    assert found.deterministic == "batch" and 'under deterministic="batch"' in str(found)
    jax_bwgemm.uninstall()
    assert jax_bwgemm.explain(jnp.matmul, x, x).deterministic == "run"
    with jax_bwgemm.installed(deterministic="batch"):
        assert jax_bwgemm.explain(jnp.matmul, x, x).deterministic == "batch"


def test_defaults_hold() -> None:
    """Those of `config`, such as a device that is planned for."""
    with config(device="b200"):
        (first, *_) = calls(lowered(mlp, *MLP))
    assert first["target"] == "sm_100f"
