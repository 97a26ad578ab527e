"""Measured times of products' kernels as a file has them: what `--regret` writes, and whoever fits the planner reads.

JSON with a line for each product: the fields of its problem that are not the default, which kernel the planner would
have chosen, and of each kernel its tile's position in the list of tiles, whether it computes the transposed product,
and its microseconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_bwgemm.facts.epilogue import Epilogue, parse
from jax_bwgemm.facts.problem import DTYPE_BYTES, Problem
from jax_bwgemm.facts.tile import Tile

FORMAT = 2
OWN = "own"  # of `facts`, "results": each launch wrote a memory of its own; where nothing is said, all wrote the same
# Microseconds that a memory of its own takes longer, of a result of 1 MB, and of any. By the root of the megabytes: of
# 114 products of an H200 that were timed both ways (`h200_third.json`, `h200_own_results.json`).
OWN_US, MOST_OWN_US = 0.17, 0.25
DECIMALS = 4  # of microseconds: CUPTI counts nanoseconds, and a median may lie between two
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Problem)}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A product and its kernels' microseconds, by tile and whether it computes the transposed product, without what
    pads their operands. `modelled`: the position of the kernel that the planner would have chosen, if that was kept."""

    problem: Problem
    times_us: dict[tuple[Tile, bool], float]
    modelled: int | None = None


def save(products: Iterable[Measured], path: Path, facts: dict[str, Any]) -> None:
    """`facts`: what else is to be known of the times."""
    found = list(products)
    tiles = {tile: i for i, tile in enumerate(dict.fromkeys(tile for product in found for tile, _ in product.times_us))}
    lines = [json.dumps(_fields(product, tiles), separators=(",", ":")) for product in found]
    head = json.dumps({"format": FORMAT, "facts": facts, "tiles": [str(tile) for tile in tiles]}).removesuffix("}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head}, "products": [\n' + ",\n".join(lines) + "\n]}\n")


def load(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """(facts, products). ValueError for another file."""
    try:
        fields = json.loads(path.read_text())
        if fields["format"] != FORMAT:
            raise ValueError(f"format {FORMAT} is required, got {fields['format']!r}")
        tiles = [Tile.from_str(tile) for tile in fields["tiles"]]
        return dict(fields["facts"]), [_measured(product, tiles) for product in fields["products"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"`bench` requires a file that `--regret --json` wrote, got {path}: {error}") from error


def result_bytes(problem: Problem) -> int:
    """Of the result that each launch writes."""
    return problem.batch * problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]


def with_own_results(product: Measured) -> Measured:
    """Times of launches that all wrote the same memory, as they would be if each had had one of its own."""
    more_us = min(MOST_OWN_US, OWN_US * math.sqrt(1e-6 * result_bytes(product.problem)))
    return dataclasses.replace(product, times_us={kernel: us + more_us for kernel, us in product.times_us.items()})


def fields_of(problem: Problem) -> dict[str, Any]:
    """As a result file says it: what is not the default."""
    fields = {name: getattr(problem, name) for name in _DEFAULTS} | {"epilogue": str(problem.epilogue.out)}
    defaults = _DEFAULTS | {"epilogue": str(Epilogue().out)}
    return {name: value for name, value in fields.items() if value != defaults[name]}


def problem_of(fields: dict[str, Any]) -> Problem:
    given = {"epilogue": Epilogue(parse(fields["epilogue"]))} if "epilogue" in fields else {}
    return Problem(**fields | given)


def _fields(product: Measured, tiles: dict[Tile, int]) -> dict[str, Any]:
    kernels = [
        [tiles[tile], int(is_swapped), round(us, DECIMALS)] for (tile, is_swapped), us in product.times_us.items()
    ]
    modelled = {} if product.modelled is None else {"modelled": product.modelled}
    return {"problem": fields_of(product.problem)} | modelled | {"kernels": kernels}


def _measured(fields: dict[str, Any], tiles: list[Tile]) -> Measured:
    times_us = {(tiles[i], bool(is_swapped)): float(us) for i, is_swapped, us in fields["kernels"]}
    return Measured(problem_of(fields["problem"]), times_us, fields.get("modelled"))
