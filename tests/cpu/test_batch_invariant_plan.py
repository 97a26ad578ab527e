"""`deterministic="batch"`: what is chosen for a product follows from everything but the number of rows, and XLA is said
aloud. That the bits are then equal is for the emulator (`tests/emu/test_summation.py`) and the GPU to show."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from lowered import BF16, CUDA, W, X, calls, hlo, struct

import jax_bwgemm
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.contraction import Contraction
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import A_MAJORS, B_MAJORS, Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.ops import takeover
from jax_bwgemm.ops.partition import divide
from jax_bwgemm.planner.candidates import candidates
from jax_bwgemm.planner.plan import plan
from jax_bwgemm.runtime.attempts import choose
from jax_bwgemm.runtime.config import FallbackError, FallbackWarning, config
from jax_bwgemm.runtime.rungs import Asked, Attempt
from tests.fuzz import fuzz, rounds

ROWS = (1, 2, 16, 64, 65, 500, 513, 4096)
SPLIT, STREAM = "128x128x64_cta1_cluster1x1x2", "128x256x64_cta1_cluster2x1_streamk"
DTYPES = [
    ("bfloat16",) * 3, ("float16", "float16", "float32"), ("float32",) * 3, ("int8", "uint8", "int32"),
    ("float8_e4m3fn", "float8_e5m2", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("swapped_rows")


def chosen(problem: Problem, device: str) -> Attempt:
    return choose(Asked(problem, device, batch_invariant=True))


def kind(attempt: Attempt) -> tuple[bool, bool, str]:
    """Whether there is a kernel, whether it has the epilogue, and how it sums."""
    if attempt.entry is None:
        return False, False, ""
    assert attempt.plan is not None and attempt.plan.chosen is not None
    tile = attempt.plan.chosen.tile
    assert tile.cluster_k == 1 and not tile.stream_k and not tile.direct and not attempt.plan.chosen.for_few_rows
    return True, attempt.is_fused, str(tile.promoted)


@fuzz
@pytest.mark.long
@settings(max_examples=rounds(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_chosen_does_not_depend_on_the_rows(data: st.DataObject) -> None:
    """Of all tiles for some epilogues, and of what ships, where that was built."""
    a_dtype, b_dtype, out_dtype = data.draw(st.sampled_from(DTYPES))
    n, k = (data.draw(st.one_of(st.integers(1, 300), st.sampled_from((1024, 4096, 4097)))) for _ in range(2))
    majors = data.draw(st.sampled_from(A_MAJORS)), data.draw(st.sampled_from(B_MAJORS))
    epilogues = st.builds(
        chain,
        st.sampled_from([1.0, 0.5]),
        st.booleans(),
        st.sampled_from([None, "relu", "gelu", "tanh"]),
        st.booleans(),
    )
    epilogue = chain() if out_dtype == "int32" else data.draw(epilogues)
    device, promoted = data.draw(st.sampled_from(("h200", "b200"))), data.draw(st.booleans())
    problem = Problem(1, n, k, 1, a_dtype, b_dtype, out_dtype, *majors, epilogue=epilogue, promoted=promoted)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.delenv("JAX_BWGEMM_ARTIFACTS")
        found = {
            rows: kind(chosen(dataclasses.replace(problem, m=rows, batch=batch, a_batch=batch), device))
            for rows, batch in zip(ROWS, itertools.cycle((1, 3)))
        }
    assert len(set(found.values())) == 1, found


def test_by_price_it_would() -> None:
    """Without it, few rows have other kernels, which divide k, and XLA the shortest sums."""
    few = choose(Asked(Problem(64, 4096, 14400), "h200")).plan
    assert few is not None and few.tile is not None
    assert few.problem.whole_k or few.tile.cluster_k > 1 or few.tile.stream_k or few.swapped
    assert all(kind(chosen(Problem(m, 4096, 14400), "h200"))[0] for m in ROWS)
    padded = Problem(16, 50257, 768)
    assert "XLA is done before" in (choose(Asked(padded, "h200")).reason or "")
    assert chosen(padded, "h200").entry is not None


@pytest.mark.parametrize("tile", [SPLIT, STREAM])
def test_a_tile_that_divides_k(tile: str) -> None:
    with pytest.raises(
        ValueError, match=r'`tile` .* it divides k, and `deterministic="batch"` has one order of summation'
    ):
        plan(Problem(512, 1024, 4096), ARCHS["h200"], Tile.from_str(tile), batch_invariant=True)
    assert plan(Problem(512, 1024, 4096), ARCHS["h200"], Tile.from_str(tile)).tile is not None
    with pytest.raises(ValueError, match="it divides k"):
        hlo(lambda a, b: jax_bwgemm.matmul(a, b, tile=tile, deterministic="batch", **CUDA), X, W)


def test_a_direct_tile() -> None:
    problem, tile = Problem(512, 1024, 256), Tile(64, 64, direct=True)
    with pytest.raises(ValueError, match="it is for few rows or small products"):
        plan(problem, ARCHS["h200"], tile, batch_invariant=True)
    assert plan(problem, ARCHS["h200"], tile).tile == tile


def test_candidates_that_are_left_out_stay_in_sight() -> None:
    problem, arch = Problem(16, 4096, 4096), ARCHS["h200"]
    made = plan(problem, arch, batch_invariant=True)
    assert len(made.candidates) == len(candidates(problem, arch))
    out = {c.reason for c in made.candidates if c.reason}
    assert {
        'it divides k, and `deterministic="batch"` has one order of summation',
        'it is for few rows or small products, and `deterministic="batch"` has one list of tiles',
    } <= out


@pytest.mark.parametrize("how", ["argument", "config", "environment"])
def test_how_it_is_asked_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `jit` the policy is a part of what is traced."""
    few = struct(16, 8192), struct(8192, 2048)
    matmul = jax.jit(lambda a, b: jax_bwgemm.matmul(a, b, **CUDA))
    plain = calls(matmul.trace(*few).lower(lowering_platforms=("cuda",)).as_text())[0]["variant"]
    if how == "argument":
        text = hlo(lambda a, b: jax_bwgemm.matmul(a, b, deterministic="batch", **CUDA), *few)
    elif how == "config":
        with config(deterministic="batch"):
            text = matmul.trace(*few).lower(lowering_platforms=("cuda",)).as_text()
    else:
        monkeypatch.setenv("JAX_BWGEMM_DETERMINISTIC", "batch")
        text = hlo(lambda a, b: jax_bwgemm.matmul(a, b, **CUDA), *few)
    invariant = calls(text)[0]["variant"]
    assert "mnm" not in invariant and "streamk" not in invariant and plain != invariant


def test_dot_general_takes_it() -> None:
    dims = (((1,), (0,)), ((), ()))
    few = struct(16, 4096), struct(4096, 4096)
    text = hlo(lambda a, b: jax_bwgemm.dot_general(a, b, dims, deterministic="batch", **CUDA), *few)
    same = hlo(lambda a, b: jax_bwgemm.matmul(a, b, deterministic="batch", **CUDA), *few)
    assert calls(text)[0]["variant"] == calls(same)[0]["variant"]


def test_another_value() -> None:
    with pytest.raises(ValueError, match="`deterministic` requires one of run, batch, got 'rows'"):
        jax_bwgemm.matmul(jnp.ones((8, 8)), jnp.ones((8, 8)), deterministic="rows")
    with pytest.raises(ValueError, match="`deterministic` requires one of run, batch, got True"):
        jax_bwgemm.install(deterministic=True)  # type: ignore[arg-type]


BROKEN = 'XLA\'s sums depend on the batch, so `deterministic="batch"` does not hold here'


def test_xla_is_said_aloud() -> None:
    a, b = jnp.ones((8, 16), BF16), jnp.ones((16, 8), BF16)
    with pytest.warns(FallbackWarning, match=re.escape(BROKEN)):  # no CUDA here
        jax_bwgemm.matmul(a, b, deterministic="batch")
    with pytest.raises(FallbackError, match=re.escape(BROKEN)):
        jax_bwgemm.matmul(a, b, deterministic="batch", on_fallback="error")
    with pytest.raises(FallbackError, match=re.escape(BROKEN)):  # a dtype that no kernel has
        jax_bwgemm.matmul(
            jnp.ones((8, 8), jnp.int16), jnp.ones((8, 8), jnp.int16), deterministic="batch", on_fallback="error"
        )
    with pytest.raises(FallbackError) as info:
        jax_bwgemm.matmul(a, b, on_fallback="error")
    assert BROKEN not in str(info.value)


def test_one_column_has_its_epilogue_from_xla() -> None:
    """Its rows are the kernel's columns, whose number says which epilogues there are."""

    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul(x, w, bias=bias, activation="relu", deterministic="batch", **CUDA)

    for rows in (1, 7, 512):
        text = hlo(layer, struct(rows, 512), struct(512, 1), struct(1))
        assert "identity" in calls(text)[0]["variant"] and "relu" in text
    assert "bias_relu" in calls(hlo(layer, struct(512, 512), struct(512, 512), struct(512)))[0]["variant"]


def test_explain() -> None:
    few = struct(16, 4096), struct(4096, 4096)
    text = str(jax_bwgemm.explain(*few, device="h200", deterministic="batch"))
    assert 'out: it divides k, and `deterministic="batch"` has one order of summation' in text
    assert re.search(
        r'  bits:  a row has the same in any batch, as `deterministic="batch"` asks; \d+ of \d+ tiles', text
    )
    assert "bits:" not in str(jax_bwgemm.explain(*few, device="h200"))
    xlas = str(jax_bwgemm.explain(struct(8, 8, dtype=jnp.int16), struct(8, 8, dtype=jnp.int16), deterministic="batch"))
    assert '  bits:  depend on the batch, for they are XLA\'s: `deterministic="batch"` does not hold' in xlas
    with config(deterministic="batch"):
        whole = str(jax_bwgemm.explain(lambda a, b: a @ b, *few, device="h200"))
        assert whole.splitlines()[0].endswith(', under deterministic="batch", which holds for these')


@pytest.fixture
def _uninstalled() -> Iterator[None]:
    yield
    jax_bwgemm.uninstall()


@pytest.mark.usefixtures("_uninstalled")
def test_whole_models() -> None:
    few = struct(16, 8192), struct(8192, 2048)

    def lowered(f: Callable[..., Any], *operands: Any) -> list[str]:
        return [call["variant"] for call in calls(hlo(f, *operands))]

    with config(device="h200", on_fallback="error"):
        want = lowered(lambda a, b: jax_bwgemm.matmul(a, b, deterministic="batch"), *few)
        with jax_bwgemm.installed(deterministic="batch"):
            assert lowered(lambda a, b: a @ b, *few) == want
        jax_bwgemm.install()
        plain = lowered(lambda a, b: a @ b, *few)
        jax_bwgemm.install(deterministic="batch")
        assert lowered(lambda a, b: a @ b, *few) == want != plain
        with pytest.raises(FallbackError, match=re.escape(BROKEN)):
            hlo(lambda a, b: a @ b, struct(8, 8, dtype=jnp.int16), struct(8, 8, dtype=jnp.int16))
        jax_bwgemm.install()
        assert lowered(lambda a, b: a @ b, *few) == plain
    assert takeover._deterministic is None


def test_a_sum_over_devices_is_refused() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def down(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax_bwgemm.matmul_reduce_scatter(a, b, "x")

    scattered = jax.shard_map(down, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P("x"))
    with (
        config(deterministic="batch"),
        pytest.raises(ValueError, match='`deterministic` requires "run" for `matmul_reduce'),
    ):
        scattered(jnp.ones((16, 64), BF16), jnp.ones((64, 16), BF16))


def test_a_sharded_sum_is_gathered() -> None:
    """No partial products: their order would be the devices'."""
    contraction, sizes = Contraction("mk", "kn", "mn"), {"m": 64, "k": 64, "n": 64}
    specs = [{"m": (), "k": ("x",)}, {"k": ("x",), "n": ()}]
    summed = divide(contraction, sizes, {"x": 4}, specs, {"m": (), "n": ()})
    gathered = divide(contraction, sizes, {"x": 4}, specs, {"m": (), "n": ()}, may_sum=False)
    assert (summed.summed, gathered.summed, gathered.operands["k"]) == (("x",), (), ())
    scattered = divide(contraction, sizes, {"x": 4}, specs, {"m": ("x",), "n": ()}, may_sum=False)
    assert (scattered.operands["m"], scattered.operands["k"], scattered.scattered) == (("x",), (), None)
