"""What `docs/numerics.md` says of sums and of special values, of the kernels that ship.

The order of summation is seen with tensor cores that keep few bits: an MMA adds its products to the accumulator and
then truncates. Another order along k has other bits then, and where two kernels have the same it was the same order.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_bwgemm.emulator import tcgen05, wgmma
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.planner.candidates import Candidate, candidates, why_not_invariant
from tests.cases import DTYPES, fused
from tests.emu.matmul import run_matmul
from tests.emu.shipped import facts, module, variants, why_any_missing
from tests.invariance import Case, differing

M, N, K = 20, 40, 208
BITS = 8  # that the stand-in's sums keep
BF16, F32 = "bfloat16", "float32"
E4M3 = "float8_e4m3fn"
WHY_NOT = why_any_missing("sm_90a", "sm_100f")
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def added(acc: np.ndarray | float, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """acc + a b^T of one MMA's k, with BITS of mantissa: by elements, so that no shape has an order of its own."""
    total = np.zeros((a.shape[0], b.shape[0])) + acc
    for i in range(a.shape[1]):
        total += a[:, i, None].astype(np.float64) * b[None, :, i].astype(np.float64)
    mantissa, exponent = np.frexp(total)
    return np.ldexp(np.trunc(np.ldexp(mantissa, BITS)), exponent - BITS).astype(np.float32)


def chained(a: np.ndarray, b: np.ndarray, part: slice) -> np.ndarray:
    """MMAs of 32 bytes, one after the other, over a part of k."""
    step, total = 32 // a.itemsize, np.zeros((M, N), np.float32)
    for k in range(part.start, min(part.stop, K), step):
        total = added(total, a[0, :, k : k + step], b[0, k : k + step].T)
    return total


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    def wgmmas(cta: Any, state: Any, batch: list[Any]) -> None:
        for mma in batch:
            sums = state.sums[mma.key].view(np.float32) if mma.accumulate else 0.0
            a, b = wgmma._joint_a(cta, [mma]), wgmma._joint_b(cta, [mma])
            state.sums[mma.key] = added(sums, a, b).view(np.uint32)

    def tcgen05s(desc: Any, parts: list[Any], accumulate: bool) -> None:
        b = np.concatenate([tcgen05.operand_matrix(p.cta.chunks[p.b], desc.b, desc.b_mn) for p in parts])
        for part in parts:
            a = tcgen05.operand_matrix(np.ascontiguousarray(part.cta.chunks[part.a]), desc.a, desc.a_mn)
            sums = part.cta.tmem.data.view(np.float32)
            sums[part.d_index] = added(sums[part.d_index] if accumulate else 0.0, a, b)

    monkeypatch.setattr(wgmma, "_finish", wgmmas)
    monkeypatch.setattr(tcgen05, "_finish", tcgen05s)


@functools.cache
def operands(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((1, *shape)).astype(DTYPES[dtype]) for shape in ((M, K), (K, N)))
    return a, b


def bits(of: Variant, rows: slice, **options: Any) -> np.ndarray:
    """Of a product of some rows, as a kernel computes it that sees them as they are, or transposed."""
    a, b = operands(of.a_dtype)
    a = a[:, rows]
    if of.c_major == "m":
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    stored = (a if of.a_major == "k" else a.swapaxes(1, 2)), (b if of.b_major == "n" else b.swapaxes(1, 2))
    out, _ = run_matmul(module(of.name), facts(of), *map(np.ascontiguousarray, stored), **options)
    return out[0].T if of.c_major == "m" else out[0]


def shipped(target: str, majors: str, tile: Tile, dtype: str = BF16) -> Variant:
    return Variant(
        target, dtype, dtype, BF16 if dtype == BF16 else F32, majors[0], majors[1], tile, fused("identity"), majors[2]
    )


# What may compute a product of some number of rows, and one that is transposed for few of them.
SAME = {
    "sm_90a": [
        ("knn", Tile(64, 64)),
        ("knn", Tile(128, 64)),
        ("knn", Tile(64, 128, cluster_m=2, pingpong=True)),
        ("knn", Tile(128, 256, cluster_m=2)),
        ("knn", Tile(192, 192, cluster_n=2)),
        ("knn", Tile(128, 128, cluster_m=2, pingpong=True)),
        ("kkn", Tile(128, 128)),
        ("mnn", Tile(128, 128)),
        ("mkm", Tile(128, 16)),
        ("kkm", Tile(128, 32)),
    ],
    "sm_100f": [
        ("knn", Tile(128, 64)),
        ("knn", Tile(128, 128)),
        ("knn", Tile(256, 256, cta_group=2, cluster_m=2)),
        ("kkn", Tile(256, 128, cta_group=2, cluster_m=2)),
        ("mkm", Tile(128, 32)),
    ],
}
ALIKE = [shipped(target, *case) for target, cases in SAME.items() for case in cases]
SPLIT, STREAMED = (shipped("sm_90a", "knn", tile) for tile in (Tile(64, 64, cluster_k=4), Tile(64, 64, stream_k=True)))


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("rows", [slice(0, M), slice(3, 4), slice(2, 19)], ids=["all", "one", "some"])
@pytest.mark.parametrize("of", ALIKE, ids=lambda variant: variant.name)
def test_all_tiles_add_in_one_order(of: Variant, rows: slice) -> None:
    """One MMA after the other, whatever other rows there are."""
    want = chained(*operands(BF16), slice(0, K))
    assert (bits(of, rows) == want.astype(ml_dtypes.bfloat16)[rows]).all()


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    ("of", "part", "options"),
    [(SPLIT, 64, {}), (STREAMED, 128, {"max_clusters": 2, "stream": (1, 2)})],
    ids=["split", "stream"],
)
def test_where_k_is_divided_the_order_is_another(of: Variant, part: int, options: dict[str, Any]) -> None:
    """One k tile or two each, whose sums are added in float32: no tile of batch invariance."""
    divided = bits(of, slice(0, M), **options)
    parts = [chained(*operands(BF16), slice(start, start + part)) for start in range(0, K, part)]
    assert (divided == sum(parts[1:], parts[0]).astype(ml_dtypes.bfloat16)).all()
    assert (divided != chained(*operands(BF16), slice(0, K)).astype(ml_dtypes.bfloat16)).mean() > 0.1
    assert why_not_invariant(Candidate(of.tile, Problem(M, N, K)))


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("promoted", [False, True])
def test_promoted_sums_add_stages_in_registers(promoted: bool) -> None:
    """The tensor cores' own for 128 of k, four MMAs of 32; these in float32."""
    stages = [chained(*operands(E4M3), slice(start, start + 128)) for start in range(0, K, 128)]
    plain = chained(*operands(E4M3), slice(0, K))
    got = bits(shipped("sm_90a", "kkn", Tile(128, 128, 128, promoted=promoted), E4M3), slice(0, M))
    assert (got == (sum(stages) if promoted else plain)).all() and (sum(stages) != plain).any()


@pytest.mark.parametrize(
    "dtypes", [(BF16,) * 3, (F32,) * 3, (E4M3, E4M3, BF16), ("int8", "int8", "int32")], ids=lambda dtypes: dtypes[0]
)
@pytest.mark.parametrize("arch", ["h200", "b200"])
def test_what_is_left_for_batch_invariance(arch: str, dtypes: tuple[str, str, str]) -> None:
    """For every number of rows the same tiles, one at least."""
    left = {
        tuple(
            str(c.tile) for c in candidates(Problem(m, 4096, 4096, 1, *dtypes), ARCHS[arch]) if not why_not_invariant(c)
        )
        for m in (1, 64, 65, 512, 513, 8192)
    }
    assert len(left) == 1 and len(left.pop()) > 3


SPECIAL = np.array([np.nan, np.inf, -np.inf, 3e38, 1e-39, -1e-39, 0.0, -0.0, -200.0, 200.0], np.float32)
EXPECTED = {  # of SPECIAL, in float32
    "identity": [np.nan, np.inf, -np.inf, 3e38, 1e-39, -1e-39, 0.0, 0.0, -200.0, 200.0],
    "relu": [np.nan, np.inf, 0.0, 3e38, 1e-39, 0.0, 0.0, 0.0, 0.0, 200.0],
    "gelu": [np.nan, np.inf, np.nan, 3e38, 5e-40, -5e-40, 0.0, 0.0, 0.0, 200.0],
    "silu": [np.nan, np.inf, np.nan, 3e38, 5e-40, -5e-40, 0.0, 0.0, 0.0, 200.0],
}
EPILOGUES = [*EXPECTED, "bias", "bias_relu", "bias_gelu", "scale_bias_relu", "bias_residual", "bias_relu_residual"]


def special() -> list[Variant]:
    """Of the catalogue; a scale, a bias and a relu together have another tile on Hopper."""
    tiles = {"sm_90a": Tile(128, 256, cluster_m=2), "sm_100f": Tile(128, 128)}
    made = [
        (target, BF16, BF16, BF16, "k", "n", tile, fused(kind)) for target, tile in tiles.items() for kind in EPILOGUES
    ]
    shipped = {*variants("sm_90a"), *variants("sm_100f")}
    return [of for of in (Variant(*fields) for fields in made) if of in shipped]


def test_special_values_of_nearly_all() -> None:
    assert len(special()) == 2 * len(EPILOGUES) - 1


@pytest.mark.parametrize("of", special(), ids=lambda of: of.name)
def test_special_values(of: Variant) -> None:
    """Sums of one product and zeros. Vectors and residuals are zeros, a scale is 1."""
    a, b = np.zeros((1, len(SPECIAL), 64), np.float32), np.zeros((1, 64, 64), np.float32)
    a[0, :, 0], b[0, 0] = SPECIAL, 1.0
    reads = {x.role for x in of.steps.operands}
    bias = np.zeros(64, ml_dtypes.bfloat16) if "bias" in reads else None
    residual = np.zeros((1, len(SPECIAL), 64), ml_dtypes.bfloat16) if "residual" in reads else None
    bf16 = (x.astype(ml_dtypes.bfloat16) for x in (a, b))
    out, _ = run_matmul(module(of.name), facts(of), *bf16, 1.0, bias, residual)
    kinds = [kind for kind in EXPECTED if kind in of.name]
    want = np.array(EXPECTED[kinds[0] if kinds else "identity"], np.float32)
    got = out[0].astype(np.float32)
    assert (got == got[:, :1]).all(where=~np.isnan(got))
    np.testing.assert_array_equal(np.isnan(got[:, 0]), np.isnan(want))
    near = np.isclose(got[:, 0], want, rtol=2**-8, atol=1e-40, equal_nan=True)
    assert near.all(), got[:, 0]
    assert not np.signbit(got[6:8, 0]).any()  # a sum of zeros is +0


def test_float8_results_saturate() -> None:
    """Infinities too; NaN stays NaN."""
    of = Variant("sm_90a", E4M3, E4M3, E4M3, "k", "k", Tile(128, 128, 128), fused("identity"))
    a, b = np.zeros((1, 4, 128), np.float32), np.zeros((1, 128, 128), np.float32)
    a[0, :, 0], b[0, :, 0] = [np.nan, 448.0, -448.0, 1.0], 2.0
    out, _ = run_matmul(module(of.name), facts(of), *(x.astype(ml_dtypes.float8_e4m3fn) for x in (a, b)))
    np.testing.assert_array_equal(out[0, :, 0].astype(np.float32), [np.nan, 448.0, -448.0, 2.0])


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_rows_keep_their_bits(target: str) -> None:
    """What a GPU is to show of random products, through JAX and the planner."""
    options = (("bias", True), ("activation", "gelu"))
    case = Case(130, 72, 200, (BF16,) * 3, "kn", options, 0)
    assert differing(case, emulate=target) == []


@pytest.mark.usefixtures("coarse")
def test_without_the_policy_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that divide k are for some numbers of rows only."""
    sizes = (200, 64, 1152), (200, 64, 1280), (150, 128, 1408), (130, 256, 1536), (200, 64, 4096)
    cases = (Case(*size, (BF16,) * 3, "kn", (), 0) for size in sizes)
    found = (differing(case, emulate="sm_90a", deterministic="run") for case in cases)
    assert any("rows" in way for ways in found for way in ways)
