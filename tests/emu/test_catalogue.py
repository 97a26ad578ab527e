"""The shipped catalogue, executed: every kernel for Blackwell on an even or an odd shape, under five schedules in turn,
and one of those that wait alike (`shipped.leaders`) on both, under three on each, which are all of them.

sm_90a, which also runs on hardware, is sampled. `make test-every` has each of these under all schedules.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_bwgemm.emulator import Schedule
from jax_bwgemm.facts.arch import TARGETS
from jax_bwgemm.facts.epilogue import ACC, in_place, label
from jax_bwgemm.facts.problem import INT8_DTYPES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.compile import compile_variant
from jax_bwgemm.runtime import artifacts
from tests.cases import Case, check_case
from tests.emu.expressions import check_expression
from tests.emu.matmul import case_of, run_matmul
from tests.emu.mutant import KERNELS
from tests.emu.shipped import facts, module, num_schedules, ptx, variants, why_missing
from tests.fuzz import in_turn

pytestmark = pytest.mark.long


def chains(target: str) -> list[Variant]:
    """`activation(alpha * acc + bias) + residual`, or a part of it."""
    return [v for v in variants(target) if in_place(v.steps) is not None and not v.tile.symmetric]


def expressions(target: str) -> list[Variant]:
    """All else: other expressions, several results, two b. (`test_gram_emulated` has symmetric products.)"""
    return [v for v in variants(target) if in_place(v.steps) is None and not v.tile.symmetric]


BLACKWELL = [*chains("sm_100f"), *chains("sm_100a")]
Operands = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def hopper_sample() -> list[Variant]:
    """Each tile, majors and dtypes in turn; then each epilogue once."""
    plain = [v for v in chains("sm_90a") if v.epilogue == ACC]
    tiles = list(dict.fromkeys(v.tile for v in plain))
    of_tile = [[v for v in plain if v.tile == tile] for tile in tiles]
    fused = {label(v.epilogue): v for v in chains("sm_90a") if v.epilogue != ACC}
    return [own[5 * i % len(own)] for i, own in enumerate(of_tile)] + list(fused.values())


DIVISION = re.compile(r"^\s*(?:@\S+\s+)?((?:div|rem)\.[us](?:32|64)\s.*%\w+);", re.MULTILINE)  # by a register


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_do_not_divide(target: str) -> None:
    """By what only the launch knows: its launcher works that out. The order of a triangle has not been taught that."""
    found = {v.tile.symmetric: [] for v in variants(target)}
    for variant in variants(target):
        found[variant.tile.symmetric] += [(variant.name, line) for line in DIVISION.findall(ptx(variant.name))]
    assert found[False] == []
    assert found.get(True, True)  # else the pattern has lost its sense


def even(variant: Variant) -> Case:
    """Two whole cluster tiles; with four steps of k each they fill the load pipeline more than once."""
    tile = variant.tile
    return case_of(variant, tile.cluster_m * tile.cta_m, 2 * tile.cluster_n * tile.mma_n, 4 * tile.k_tile)


def odd(variant: Variant) -> Case:
    """Rests along m, n and k; two matrices that share an operand; 4 tiles turn both accumulators over."""
    tile = variant.tile
    step = 1 if variant.store == "threads" else 16  # what TMA can step over, whatever the dtype
    m = tile.cluster_m * tile.cta_m - (7 if (variant.a_major, variant.c_major) == ("k", "n") else step)
    case = case_of(variant, m, tile.cluster_n * tile.mma_n + step, 2 * tile.k_tile + 8)
    shares_a = variant.b_major == "k"
    return dataclasses.replace(case, batch=2, a_batch=1 + (not shares_a), b_batch=1 + shares_a)


def run(variant: Variant, case: Case, operands: Operands, schedule: Schedule, **launch: Any) -> np.ndarray:
    """What the variant's kernel makes of `operands`: a, b, bias and residual."""
    a, b, bias, residual = operands
    kernel = module(variant.name), facts(variant)
    options = {"schedule": schedule} | launch
    return run_matmul(*kernel, a, b, case.alpha, bias, residual, **options)[0]


def run_schedules(variant: Variant, case: Case, count: int, first: int = 0) -> None:
    """`count` of the five schedules, by the variant's name, from a seed of its own; every other one on a single
    cluster."""
    if reason := why_missing(variant):
        pytest.skip(reason)
    seed = zlib.crc32(variant.name.encode()) % 1000 + 1
    operands = *case.inputs(seed), case.residual(seed)
    want = case.reference(*operands)
    for i, schedule in in_turn(Schedule.standard(seed), seed + first, count):
        raster = {"raster_group": 1 + i % 2, "raster_along_n": i // 2 % 2, "raster_order": 1 - i % 2}
        out = run(variant, case, operands, schedule, max_clusters=(1, None)[i % 2], **raster)
        check_case(out, want, case)


def test_the_catalogue_is_built() -> None:
    assert [v.name for target in TARGETS for v in variants(target) if why_missing(v)] == []


def shapes_of(variant: Variant) -> list[Callable[[Variant], Case]]:
    """Both of a leader, one of each other, by its name."""
    count = 2 if num_schedules(variant) > 1 else 1
    return [shape for _, shape in in_turn((even, odd), zlib.crc32(variant.name.encode()), count)]


@pytest.mark.parametrize(
    ("variant", "shape"),
    [pytest.param(v, shape, id=f"{v.name}-{shape.__name__}") for v in BLACKWELL for shape in shapes_of(v)],
)
def test_blackwell(variant: Variant, shape: Callable[[Variant], Case]) -> None:
    """Another schedule on the odd shape than on the even one."""
    run_schedules(variant, shape(variant), num_schedules(variant), 2 if shape is odd else 0)


def hopper_expressions() -> list[Variant]:
    """Each with each of its tiles once, in turn of another dtype or major."""
    found: dict[tuple[str, Tile], list[Variant]] = {}
    for variant in expressions("sm_90a"):
        found.setdefault((str(variant.steps), variant.tile), []).append(variant)
    return [own[i % len(own)] for i, own in enumerate(found.values())]


@pytest.mark.parametrize("variant", [*expressions("sm_100f"), *hopper_expressions()], ids=lambda v: v.name)
def test_expressions(variant: Variant) -> None:
    """Hopper's, which run on hardware too, under one of the five schedules, by their names."""
    if reason := why_missing(variant):
        pytest.skip(reason)
    tile, seed = variant.tile, zlib.crc32(variant.name.encode()) % 1000 + 1
    rest = 16 - 32 * (seed % 2)  # a part of a second tile below, or beside; and not all of the first the other way
    shape = tile.cluster_m * tile.cta_m + rest, tile.cluster_n * tile.out_n - rest, 2 * tile.k_tile + 8
    for _, schedule in in_turn(Schedule.standard(seed), seed, num_schedules(variant)):
        check_expression(variant, module(variant.name), facts(variant), shape, schedule, seed)


def one_of_each_tile() -> list[Variant]:
    """In turn of another dtype, major or epilogue."""
    tiles = list(dict.fromkeys((v.tile, v.c_major, v.store) for v in BLACKWELL))
    of_tile = [[v for v in BLACKWELL if (v.tile, v.c_major, v.store) == tile] for tile in tiles]
    return [own[7 * i % len(own)] for i, own in enumerate(of_tile)]


def extremes(variant: Variant) -> list[Case]:
    """Next to nothing, one k tile, tall, wide, deep."""
    tile, step = variant.tile, 1 if variant.store == "threads" else 16
    m, n, k = tile.cta_m, tile.mma_n, tile.k_tile
    sizes = [(step, step, step), (m + step, n - step or step, k), (5 * m + step, step, k), (step, 3 * n + step, k)]
    return [case_of(variant, *size) for size in [*sizes, (step, step, 9 * k + step)]]


@pytest.mark.parametrize("variant", one_of_each_tile(), ids=lambda variant: variant.name)
def test_extreme_shapes(variant: Variant) -> None:
    if reason := why_missing(variant):
        pytest.skip(reason)
    for seed, case in enumerate(extremes(variant)):
        operands = *case.inputs(seed), case.residual(seed)
        out = run(variant, case, operands, Schedule.standard(seed)[seed], max_clusters=2)
        check_case(out, case.reference(*operands), case)


@pytest.mark.parametrize("variant", KERNELS.values(), ids=lambda variant: variant.name)
def test_many_orders(variant: Variant) -> None:
    """Twenty random orders of warps and completions; each CTA of a pair lags behind the other in some."""
    if reason := why_missing(variant):
        pytest.skip(reason)
    tile = variant.tile
    case = case_of(variant, tile.cluster_m * tile.cta_m, tile.cluster_n * tile.mma_n, tile.k_tile)
    a, b, _ = case.inputs(seed=1)
    want = case.reference(a, b, None)
    for seed in range(1, 21):
        schedule = Schedule.standard(seed)[4]
        out, _ = run_matmul(module(variant.name), facts(variant), a, b, schedule=schedule)
        check_case(out, want, case)


@pytest.mark.parametrize("variant", hopper_sample(), ids=lambda variant: variant.name)
def test_hopper(variant: Variant) -> None:
    run_schedules(variant, odd(variant), 2)


@pytest.mark.parametrize("variant", variants("sm_100f")[::60], ids=lambda variant: variant.name)
def test_a_familys_kernels_are_those_of_its_first_chip(variant: Variant) -> None:
    """But for the target line and the names that hold it; and in the cubin for one byte of the ELF header's flags."""
    own = dataclasses.replace(variant, target="sm_100a")
    with tempfile.TemporaryDirectory() as dump:
        kernel = compile_variant(own, Path(dump))
    assert kernel.ptx.replace("sm_100a", "sm_100f") == ptx(variant.name)
    cubin = Path(str(artifacts.find_ptx(variant))).with_name(f"{variant.name}.cubin").read_bytes()
    same = kernel.cubin.replace(b"sm_100a", b"sm_100f")
    assert [i for i, (x, y) in enumerate(zip(same, cubin, strict=True)) if x != y] == [48]


def test_integers_alone_are_of_one_architecture() -> None:
    assert {variant.a_dtype for variant in variants("sm_100a")} == set(INT8_DTYPES)
    assert not {variant.a_dtype for variant in variants("sm_100f")} & set(INT8_DTYPES)
