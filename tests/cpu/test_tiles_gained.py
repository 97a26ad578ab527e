"""What tiles gain over those that shipped before them, of products whose kernels were all timed: the numbers of
docs/hopper.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

import jax_bwgemm.bench
from jax_bwgemm.bench import spare
from jax_bwgemm.bench.fit import load
from jax_bwgemm.bench.kernel_times import Measured
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import variant_for
from jax_bwgemm.kernels.aot.catalog import HOPPER_DEEP_WIDE, catalogue

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "hopper.md").read_text().split())
RESULTS = Path(jax_bwgemm.bench.__file__).parent / "results" / "regret"
WORDS = ("none", "one", "two", "three", "four", "five", "six")
IN_EIGHTS = {
    *(f"{shape}x64_cta1_cluster4x2_pingpong" for shape in ("64x96", "128x96", "128x128")),
    *(f"{shape}x64_cta1_cluster4x2_streamk" for shape in ("64x96", "128x128", "128x160", "128x192")),
    *("128x64x64_cta1_cluster2x4_pingpong", "64x96x64_cta1_cluster1x1x8"),
}
TRIED = {
    "knn": "64x16 1x2_streamk, 64x16 2x1_streamk",
    "kkn": "128x160 4x2_pingpong, 64x96 1x4_pingpong, 64x144 4x1_pingpong, 64x48 1x1_pingpong, "
    "64x32 1x2_pingpong, 64x16 4x1_streamk",
    "mnn": "128x160 4x2, 64x32 1x4_pingpong, 64x16 1x2_streamk, 64x16 4x1_pingpong",
    "mkm": "64x16 1x1_pingpong, 64x16 1x2_streamk, 64x16 4x1_streamk, 64x32 1x2_streamk, 64x64 4x1_pingpong, "
    "64x256 1x1, 128x80 2x4_pingpong, 128x112 4x2_pingpong",
    "kkm": "64x16 1x1_pingpong, 64x16 1x2_streamk, 64x112 4x1_pingpong, 64x144 2x4_pingpong, "
    "128x80 4x2_pingpong, 128x240 4x1, 256x160 1x2",
    "mnm": "64x16 1x2_streamk, 64x16 2x2_streamk, 128x16 4x1_streamk, 64x192 4x1_streamk, "
    "64x192 2x4_pingpong, 192x192 1x1",
}  # tiles, by majors, that came last
LATER = {"x64_cta1_cluster".join(tile.split()) for text in TRIED.values() for tile in text.split(", ")}


def test_what_streams_in_clusters_of_four_gained() -> None:
    """Among kernels that ship, as docs/hopper.md and the changelog say; tiles in clusters of eight came later."""
    large = Tile(192, 160, cluster_m=2, cluster_n=2, stream_k=True)
    products = load(RESULTS / "h100_deep.json")[1]
    _check_gain(products, {str(tile) for tile in (HOPPER_DEEP_WIDE, large)}, IN_EIGHTS | LATER)


def test_what_clusters_of_eight_gained() -> None:
    products = [x for x in load(RESULTS / "h100_clusters.json")[1] if min(x.problem.m, x.problem.n) > 64]
    _check_gain(products, IN_EIGHTS, LATER)


def test_what_all_tiles_would_gain() -> None:
    """Beside the kernels that ship, as docs/hopper.md says; and thin ones beside others."""
    arch, products = load(RESULTS / "h200_explored.json")
    least = [min(spare.of_what_ships(product, arch.target).times_us.values()) for product in products]
    behind = [us / min(product.times_us.values()) - 1 for us, product in zip(least, products, strict=True)]
    mean, p90, most = (f"{100 * x:.1f}" for x in (np.mean(behind), np.percentile(behind, 90), max(behind)))
    tiles = {tile for product in products for tile, _ in product.times_us}
    assert f"{len(tiles)} tiles, those that ship among them" in PAGE
    assert f"over {len(products)} products of an H200" in PAGE
    said = (
        f"the fastest that ships is {mean} % behind the fastest of all, of one product in ten {p90} %, at most {most} %"
    )
    assert said in PAGE, said
    few = [product for product in products if min(product.problem.m, product.problem.n) <= 8]
    leads = []
    for product in few:
        thin, others = (
            min((us for (tile, _), us in product.times_us.items() if tile.is_thin == own), default=math.inf)
            for own in (True, False)
        )
        if thin < others:
            leads.append((product.problem, others / thin))
    ((one, lead),) = leads
    shape = f"({one.m}x{one.n}x{one.k}, by {100 * (lead - 1):.0f} %)"
    assert f"of the {len(few)} of these products" in PAGE and f"all but one {shape}" in PAGE, shape


def test_what_the_tiles_gain_that_few_ctas_load_for_all() -> None:
    """With those that came beside them: of random products, that of docs/hopper.md."""
    tiles = {
        "knn": "64x192 4x1_streamk, 128x224 4x1",
        "kkn": "64x192 4x1_streamk, 64x112 4x1_pingpong",
        "mnn": "64x192 4x1_streamk",
        "mkm": "64x80 4x1_pingpong, 64x80 4x2_pingpong, 64x160 4x2_pingpong, 128x80 4x1_pingpong, "
        "128x112 4x1_pingpong, 128x224 2x1",
        "kkm": "64x80 4x2_pingpong, 64x112 4x1_streamk, 128x80 4x1_pingpong, 128x112 4x1_pingpong, "
        "128x128 4x1_pingpong, 128x224 2x1",
        "mnm": "128x224 2x1",
    }
    names = _names(tiles)
    arch, products = load(RESULTS / "h200_shared.json")
    gains = []
    for product in products:
        times_us = spare.by_variant(spare.of_what_ships(product, arch.target), arch.target)
        others, own = ([us for v, us in times_us.items() if (v.name in names) == is_new] for is_new in (False, True))
        gains += [min(others) / min(own) - 1] if others and own and min(own) < min(others) else []
    said = f"of the {len(products)} random ones of `bench/results/regret/h200_shared.json` {WORDS[len(gains)]} gain, "
    said += f"{100 * min(gains):.0f} to {100 * max(gains):.0f} %"
    assert said in PAGE, said


def test_what_the_tiles_gain_that_were_tried_for_random_products() -> None:
    """What shipped before and what ships since, to the fastest of all that were timed: those of docs/hopper.md."""
    names = _names(TRIED)
    lost: dict[str, list[float]] = {"before": [], "since": []}
    for name in ("h200_trial", "h200_trial_again", "h200_trial_held_out"):
        arch, products = load(RESULTS / f"{name}.json")
        for product in products:
            least_us = min(product.times_us.values())
            ships = spare.by_variant(spare.of_what_ships(product, arch.target), arch.target)
            lost["since"].append(min(ships.values()) / least_us - 1)
            lost["before"].append(min(us for own, us in ships.items() if own.name not in names) / least_us - 1)
    means = {when: 100 * statistics.fmean(losses) for when, losses in lost.items()}
    large = {when: 1000 * statistics.fmean(loss > 0.04 for loss in losses) for when, losses in lost.items()}
    said = f"was {means['before']:.1f} % behind the fastest of all, over 4 % for {large['before']:.0f} in a thousand"
    assert said in PAGE, said
    said = f"{len(names)} of them ship since, and {means['since']:.1f} % is left, over 4 % for {large['since']:.0f} in"
    assert said in PAGE, said


def test_how_much_longer_192x192_takes_for_long_layers() -> None:
    """Than 128x256, as docs/architecture.md says."""
    _, products = load(RESULTS / "h200_large.json")
    ratios = []
    for product in products:
        sized = [((tile.mma_m, tile.mma_n), us) for (tile, _), us in product.times_us.items()]
        wide, square = ([us for own, us in sized if own == size] for size in ((128, 256), (192, 192)))
        ratios += [min(square) / min(wide) - 1] if wide and square else []
    least, most = (f"{own(min(x.times_us.values()) for x in products) / 1000:.1f}" for own in (min, max))
    page = " ".join((Path(__file__).parents[2] / "docs" / "architecture.md").read_text().split())
    said = f"The {len(products)} of `h200_large.json` are layers of {least} to {most} ms"
    assert said in page, said
    said = f"192x192 there, which takes {100 * min(ratios):.0f} to {100 * max(ratios):.0f} % longer than 128x256"
    assert said in page, said


def _check_gain(products: list[Measured], new: Collection[str], later: Collection[str]) -> None:
    """What the `new` tiles made faster, as docs/hopper.md says, beside all others but `later` ones."""
    ships = {variant.name for variant in catalogue(["sm_90a"])}
    gained = []
    for product in products:
        forms = {False: product.problem, True: product.problem.transposed}
        times = [
            (str(tile) in new, us)
            for (tile, flips), us in product.times_us.items()
            if str(tile) not in later and variant_for(forms[flips], tile, "sm_90a").name in ships
        ]
        gained.append(1 - min(us for _, us in times) / min(us for is_new, us in times if not is_new))
    faster = [x for x in gained if x > 0.015]
    said = f"made {len(faster)} faster by {100 * min(faster):.0f} to {100 * max(faster):.0f} % on an H100"
    assert f"of {len(gained)} products" in PAGE and said in PAGE, (len(gained), said)


def _names(tiles: Mapping[str, str]) -> set[str]:
    """Of plain bfloat16 kernels that ship, given by majors: size, cluster and ways."""
    names = {
        f"sm_90a_bf16_bf16_bf16_{majors}_{size}x64_cta1_cluster{ways}_identity"
        for majors, text in tiles.items()
        for size, ways in (tile.split() for tile in text.split(", "))
    }
    assert names <= {variant.name for variant in catalogue(["sm_90a"])}
    return names
