"""`explain --choices`: what the planner chooses for some 160 products on three devices, a line each.

Of the kernels that the catalogue lists, whether they are built or not, and by the tables that ship, whichever build
they timed; never by a table of the user's. So the text depends on this package alone, and a change of the planner, the
catalogue or a table is a difference of it.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence

from jax_bwgemm.bench.cases import DEFAULT, FORMS, Case
from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.tile import FEW
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.planner import measured
from jax_bwgemm.planner.plan import Plan, plan

DEVICES = ("h100", "h200", "b200")
UNTUNED = (
    *(f"{m}x11008x4096" for m in (128, 192, 300, 448, 640)),
    *(f"{size}x{size}x{size}" for size in (512, 768, 1280, 1536, 1792, 2560, 12288)),
    "200x4096x4096",
    "100x4096x11008",
    "1x4096x4096",
    "7x4096x4096",
    "24x5120x5120",
    "24x5120x5120:bias+relu",
    "48x8192x8192",
    "64x4096x14336:bias+residual",
    "64x4096x14336:f16",
    "64x4096x14336:f16:bias+gelu",
    "1024x1024x65536:bias",
    "128*2048x2048x128:nt",
    "2880x2880x32768:tn->f32",
)  # of which XLA is known to be the faster one, or which had no tile of their own
FURTHER = (
    "8192x28672x4096",
    "16x14336x4096:bias",
    "4096x4096x4096:tn:f32",
    "4096x4096x4096:nt:f32:bias",
    "8192x8192x8192:nt:s8->s32",
    "8192x16x4096",
    "128x512x16384",
)  # what the lists before have none of: columns in place of rows, gradients of TF32, integers
NUM_RANDOM, SEED = 100, 14
LARGEST = 16384
DTYPES = (
    ("bf16", 0.55),
    ("bf16->f32", 0.1),
    ("f16", 0.1),
    ("f32", 0.1),
    ("e4m3->bf16", 0.1),
    ("s8->s32", 0.05),
)  # as a case writes them, with their shares
MIN_FLOPS = 10**6
COLUMNS = (("product", 51), ("device", 8), ("tile", 45), ("tile order", 20), ("L2 hints and more; chosen by", 0))


def text() -> str:
    """A table of all choices, sorted by the products' sizes."""
    rows = [(str(case), device, *_words(choice(case, device))) for case in cases() for device in DEVICES]
    return "\n".join(map(_line, [[name for name, _ in COLUMNS], *rows]))


def cases() -> list[Case]:
    """The benchmark's products, others that were measured, and random ones."""
    found = dict.fromkeys([*map(Case.from_str, (*DEFAULT, *UNTUNED, *FURTHER)), *_random_cases()])
    return sorted(found, key=lambda case: (case.batch, case.m, case.n, case.k, str(case)))


def choice(case: Case, device: str) -> Plan:
    """The plan with every kernel of the catalogue at hand."""
    arch, problem = ARCHS[device], case.fused
    return plan(problem, arch, missing=why_not_listed, record=measured.shipped(device, problem))


def why_not_listed(variant: Variant) -> str | None:
    return None if variant in _listed(variant.target) else "the catalogue lists no such kernel"


def _line(row: Sequence[str]) -> str:
    return "".join(word.ljust(width) for word, (_, width) in zip(row, COLUMNS, strict=False)).rstrip()


def _words(chosen: Plan) -> tuple[str, ...]:
    if chosen.tile is None:
        return (f"none: {chosen.reason}",)
    tile = f"{chosen.tile}{' swapped' if chosen.swapped else ''}"
    order = f"{'columns' if chosen.raster_along_n else 'rows'} {chosen.raster_group} {chosen.raster_order}"
    stream = f", {chosen.stream.tiles} tiles by {chosen.stream.clusters} clusters" if chosen.stream.tiles else ""
    start = ", starts early" if chosen.pdl else ""
    return tile, order, f"a {chosen.a_l2}, b {chosen.b_l2}{stream}{start}; {chosen.source}"


@functools.lru_cache(maxsize=len(ARCHS))
def _listed(target: str) -> frozenset[Variant]:
    return frozenset(catalogue([target]))


EPILOGUES = tuple(
    "+".join(filter(None, steps))
    for steps in itertools.product(("", "bias"), ("", "relu", "gelu", "silu"), ("", "residual"))
    if any(steps)
)  # of what ships


def _random_cases() -> list[Case]:
    """Those of at least MIN_FLOPS. Of `random`, only what every version of Python draws alike."""
    draw, found = random.Random(SEED).random, list[Case]()
    while len(found) < NUM_RANDOM:
        case = Case.from_str(_random_case(draw))
        found += [case] if case.flops >= MIN_FLOPS else []
    return found


def _random_case(draw: Callable[[], float]) -> str:
    """Sizes are log-uniform in 1..LARGEST; a quarter have few rows, another are no multiples of 8. Epilogues belong to
    forward passes."""
    largest_m, step = FEW if draw() < 0.25 else LARGEST, 1 if draw() < 0.25 else 8
    m, n, k = (round(math.exp(draw() * math.log(largest))) for largest in (largest_m, LARGEST, LARGEST))
    sizes = f"{m}x{-(-n // step) * step}x{-(-k // step) * step}"
    form, dtypes = _pick(draw, [(form, 1.0) for form in FORMS]), _pick(draw, DTYPES)
    has_epilogue = draw() < 0.4 and form != "tn" and dtypes != "s8->s32"
    epilogue = f":{_pick(draw, [(name, 1.0) for name in EPILOGUES])}" if has_epilogue else ""
    return f"{'8*' if draw() < 0.1 else ''}{sizes}:{form}:{dtypes}{epilogue}"


def _pick(draw: Callable[[], float], shares: Sequence[tuple[str, float]]) -> str:
    at = draw() * sum(share for _, share in shares)
    for name, share in shares:
        if at < share:
            return name
        at -= share
    return shares[-1][0]
