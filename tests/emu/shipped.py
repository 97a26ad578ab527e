"""The kernels that ship: PTX and launch facts from the artifact directories, as a launcher finds them."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import pathlib
import shutil

from jax_bwgemm.emulator import parse
from jax_bwgemm.emulator.syntax import Module
from jax_bwgemm.facts.epilogue import in_place
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue
from jax_bwgemm.runtime import artifacts
from tests.emu.matmul import Facts, by_source

KEPT = 8  # kernels: tests of one follow each other, and all of them would take gigabytes of each worker


def variants(target: str) -> list[Variant]:
    """The catalogue of one target."""
    return catalogue((target,))


@functools.cache
def leaders(target: str) -> frozenset[Variant]:
    """Of the kernels that compute in one way (chains, further expressions, symmetric products), one of each tile, major
    of the result, way of storing it, and number of matrices and results: from these follows which warps wait for which,
    so these run under more schedules than the others, which take turns."""
    of = {(v.tile, v.c_major, v.store, v.moves, in_place(v.steps) is None): v for v in variants(target)}
    return frozenset(of.values())


def num_schedules(variant: Variant) -> int:
    """Under how many of the five a kernel for Blackwell runs on each shape; on two shapes, a leader under all."""
    return 3 if variant in leaders("sm_100f") else 1


@functools.cache
def why_any_missing(*targets: str) -> str | None:
    """One sentence if a variant of theirs was not built; modules ask while they are collected."""
    return next(filter(None, map(why_missing, catalogue(targets))), None)


def why_missing(variant: Variant) -> str | None:
    """One sentence if the variant was not built."""
    found = artifacts.find(variant)
    return found if isinstance(found, str) else None


@functools.lru_cache(maxsize=KEPT)
def ptx(name: str) -> str:
    """The text of a built variant."""
    paths = [directory / f"{name}.ptx.gz" for directory in artifacts.artifact_dirs()]
    return gzip.decompress(next(path for path in paths if path.exists()).read_bytes()).decode()


def copy_alone(variant: Variant, directory: pathlib.Path) -> pathlib.Path:
    """Makes an artifact directory with one built variant; returns its PTX."""
    entry, source = artifacts.find(variant), artifacts.find_ptx(variant)
    assert not isinstance(entry, str) and not isinstance(source, str)
    artifacts.write_manifest(directory, [entry])
    for suffix in (".cubin", ".ptx.gz"):
        shutil.copy(source.with_name(entry.name + suffix), directory)
    return directory / source.name


def rewrite_ptx(path: pathlib.Path, content: bytes) -> None:
    """As if the one kernel of `copy_alone` had been built with this file of PTX."""
    (entry,) = artifacts.Manifest.load(path.parent).entries.values()
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    artifacts.write_manifest(path.parent, [dataclasses.replace(entry, ptx_sha256=digest)])


@functools.lru_cache(maxsize=KEPT)
def module(name: str) -> Module:
    return parse(ptx(name))


def facts(variant: Variant) -> Facts:
    """What the manifest says of a built variant."""
    entry = artifacts.find(variant)
    assert not isinstance(entry, str), entry
    return Facts(
        variant,
        tuple((leaf.source, leaf.size) for leaf in entry.recipe.params),
        entry.num_threads,
        entry.smem_bytes,
        by_source(entry.recipe.tensor_maps),
        entry.entry,
    )
