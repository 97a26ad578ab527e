"""What a launcher must know of a compiled rung, in plain numbers, and as files: a cubin each and one JSON.

Knows neither CuTeDSL nor the package, so that a machine with a GPU needs only numpy, the CUDA driver and these files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

INDEX, FORMAT = "rungs.json", 1
ELEMENT_BYTES, SWIZZLE_BYTES = 2, 128  # bfloat16; of the operands' stages, whose rows of k are one swizzle span

Dim = tuple[int, int, int]
Box = tuple[int, int]


class Map(NamedTuple):
    """A tensor map of a row-major bfloat16 matrix; sizes in elements, the contiguous dimension first."""

    address: int
    dims: tuple[int, int]
    strides: tuple[int]  # in bytes
    box: Box
    swizzle: int  # bytes


@dataclasses.dataclass(frozen=True)
class Facts:
    """Of a kernel that takes tensor maps of a (m, k) and b (n, k); c's (m, n), or its address; then m, n and k.

    `tile`: rows and columns of c that a CTA computes. `boxes`: of one TMA load of a, of b, and of one store, as
    (contiguous, other) elements; without the last, threads store.
    """

    name: str
    arch: str
    entry: str
    num_threads: int
    smem_bytes: int
    cluster: Dim
    tile: tuple[int, int]
    is_persistent: bool
    boxes: tuple[Box, Box, Box | None]

    def cta_tiles(self, m: int, n: int) -> tuple[int, int]:
        """CTA tiles along m and n, in whole clusters."""
        (rows, cols), (along_m, along_n, _) = self.tile, self.cluster
        return along_m * -(-m // (along_m * rows)), along_n * -(-n // (along_n * cols))

    def grid(self, m: int, n: int, max_clusters: int) -> Dim:
        """A CTA for each tile, along m first; a persistent kernel starts no more clusters than run at once."""
        tiles_m, tiles_n = self.cta_tiles(m, n)
        if not self.is_persistent:
            return tiles_m, tiles_n, 1
        along_m, along_n, _ = self.cluster
        return along_m, along_n, min(tiles_m * tiles_n // (along_m * along_n), max_clusters)

    def params(self, shape: Sequence[int], addresses: Sequence[int]) -> list[Map | int]:
        """The kernel's, for a, b and c at these addresses."""
        (m, n, k), (a, b, c), (a_box, b_box, c_box) = shape, addresses, self.boxes
        out = _map(c, (m, n), c_box, c_box[0] * ELEMENT_BYTES) if c_box else c
        return [_map(a, (m, k), a_box, SWIZZLE_BYTES), _map(b, (n, k), b_box, SWIZZLE_BYTES), out, m, n, k]


def _map(address: int, shape: tuple[int, int], box: Box, swizzle: int) -> Map:
    rows, cols = shape
    return Map(address, (cols, rows), (ELEMENT_BYTES * cols,), box, swizzle)


def write(folder: Path, compiled: Iterable[tuple[Facts, bytes]]) -> None:
    """A cubin for each, named after it, and the index, last: a folder with an index is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for facts, cubin in compiled:
        (folder / f"{facts.name}.cubin").write_bytes(cubin)
        entries.append(dataclasses.asdict(facts) | {"cubin_sha256": hashlib.sha256(cubin).hexdigest()})
    (folder / INDEX).write_text(json.dumps({"format": FORMAT, "rungs": entries}, indent=2) + "\n")


def read(folder: Path) -> list[tuple[Facts, bytes]]:
    """What `write` wrote; SystemExit with a remedy if it is not whole."""
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise SystemExit(f"{folder / INDEX} requires format {FORMAT}, got {index['format']}: build it again")
        return [_read_one(folder, entry) for entry in index["rungs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"`--from` requires a folder that `--build` wrote, got {folder}: {error!r}") from error


def _read_one(folder: Path, entry: dict[str, Any]) -> tuple[Facts, bytes]:
    file = folder / f"{entry['name']}.cubin"
    cubin, wanted = file.read_bytes(), entry.pop("cubin_sha256")
    if hashlib.sha256(cubin).hexdigest() != wanted:
        raise SystemExit(f"{file} requires the sha256 of {INDEX}, got another: build both again")
    tuples: dict[str, Any] = {name: tuple(entry[name]) for name in ("cluster", "tile")}
    tuples["boxes"] = tuple(box and tuple(box) for box in entry["boxes"])
    return Facts(**entry | tuples), cubin
