"""What `doctor` finds without a GPU: versions, settings, the library, kernels and their hashes, the user's cache,
tables of times."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from jax_bwgemm import _files
from jax_bwgemm._files import FileError
from jax_bwgemm._version import __version__
from jax_bwgemm.facts.arch import TARGETS, Arch
from jax_bwgemm.planner import measured
from jax_bwgemm.runtime import artifacts, packs
from jax_bwgemm.runtime.artifacts import Manifest, ManifestError
from jax_bwgemm.runtime.config import Config, current, variable

OLDEST_PYTHON, OLDEST_JAX = (3, 11), (0, 9, 2)
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
OTHERS = ("numpy", "nvidia-cutlass-dsl")
LIBCUDA_VARIABLE = "JAX_BWGEMM_LIBCUDA"
PATH_VARIABLES = (artifacts.VARIABLE, "JAX_BWGEMM_TABLES", "JAX_BWGEMM_LIBRARY", LIBCUDA_VARIABLE)
OTHER_VARIABLES = (*PATH_VARIABLES, "JAX_BWGEMM_COMMIT")  # than those of a `Config`


@dataclasses.dataclass(frozen=True)
class Finding:
    """`state`: "ok"; "warning": works, but not by our kernels, or not all of it; "problem": broken."""

    what: str
    state: str
    text: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"[{self.state:^7}] {self.what}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def found(what: str, state: str, sentence: str) -> Finding:
    """Of a sentence that may end with one of our remedies."""
    for remedy in (artifacts.REMEDY, packs.REMEDY):
        if sentence.endswith(f"; {remedy}"):
            return Finding(what, state, sentence.removesuffix(f"; {remedy}"), remedy + artifacts.or_variable())
    return Finding(what, state, sentence)


def python() -> Finding:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "problem", f"requires 3.11, got {text}", "use a newer Python")
    return Finding("python", "ok", text)


def jax(has_gpu: bool) -> Finding:
    """JAX and its CUDA plugin, which only a machine with a GPU needs."""
    versions = {name: _version(name) for name in ("jax", "jaxlib", *PLUGINS, *OTHERS)}
    text = ", ".join([f"jax_bwgemm {__version__}", *(f"{name} {v}" for name, v in versions.items() if v)])
    here, plugins = versions["jax"], {name: v for name in PLUGINS if (v := versions[name])}
    if here is None or _numbers(here) < OLDEST_JAX:
        return Finding("jax", "problem", f"requires jax 0.9.2 or newer, got {text}", "pip install --upgrade jax")
    if has_gpu and not plugins:
        remedy = "pip install 'jax[cuda13]', or 'jax[cuda12]' for a driver older than CUDA 13"
        return Finding("jax", "warning", f"a GPU requires JAX's CUDA plugin, got none in {text}", remedy)
    if others := [name for name, v in plugins.items() if _numbers(v) != _numbers(versions["jaxlib"] or "")]:
        rule = f"{others[0]} requires jaxlib's version"
        return Finding("jax", "warning", f"{rule}, got {text}", f"pip install {others[0]}=={versions['jaxlib']}")
    return Finding("jax", "ok", text)


def settings() -> tuple[Finding, Config | None]:
    """And what the environment asks for; None if that is an error, as every product then is."""
    try:
        asked = current()
    except ValueError as error:
        return Finding("settings", "problem", str(error), "set or unset it: every product raises this"), None
    fields = dataclasses.fields(Config)
    own = [f"{variable(x.name)}={getattr(asked, x.name)}" for x in fields if getattr(asked, x.name) != x.default]
    own += [f"{name}={os.environ[name]}" for name in OTHER_VARIABLES if os.environ.get(name)]
    text = ", ".join(own) or "the defaults"
    if wrong := [*_absent(), *_unknown({variable(x.name) for x in fields})]:
        return Finding("settings", "warning", f"{text}; {'; '.join(wrong)}", "correct or unset it"), asked
    return Finding("settings", "ok", text), asked


def _absent() -> Iterator[str]:
    """Of each variable that names files or directories: one that is not there. A name without a directory is looked for
    by the loader."""
    for name in PATH_VARIABLES:
        value = os.environ.get(name, "")
        paths = value.split(os.pathsep) if name == artifacts.VARIABLE else [value]
        for path in paths:
            if path and not (name == LIBCUDA_VARIABLE and os.sep not in path) and not os.path.exists(path):
                yield f"{name} requires a path that exists, got {path}"


def _unknown(known: Collection[str]) -> Iterator[str]:
    """Of the environment, what looks like a variable of this package and is none."""
    for name in sorted(os.environ):
        if name.startswith(variable("")) and name not in {*known, *OTHER_VARIABLES}:
            yield f"{name} is no variable of this package"


def library() -> Finding:
    from jax_bwgemm.runtime import ffi

    if reason := ffi.status():
        return Finding("library", "problem", reason)
    if ffi.version() != __version__:
        rule = f"requires the library of {__version__}, got that of {ffi.version()}"
        return Finding("library", "problem", rule, ffi.remedy())
    return Finding("library", "ok", f"loads; XLA FFI API 0.{ffi.api_minor()}")


def kernels(targets: Collection[str]) -> Iterator[Finding]:
    """One finding an artifact directory, of which every cubin is hashed. Each of `targets`, which this machine's GPUs
    are, must have kernels somewhere; what is wrong with others' is a warning."""
    counts: Counter[str] = Counter()
    for directory in artifacts.artifact_dirs():
        own, wrong, how = _examined(directory)
        counts += own
        ours = [sentence for sentence in wrong if not _is_of_others(sentence, targets)]
        if wrong:
            state = "problem" if ours and (own or targets) else "warning"
            more = f" ({len(wrong) - 1} more like it)" if wrong[1:] else ""
            finding = found("kernels", state, (ours or wrong)[0])
            yield dataclasses.replace(finding, text=finding.text + more)
        else:
            each = ", ".join(f"{count} kernels for {target}" for target, count in own.items()) or "no kernels"
            yield Finding("kernels", "ok", f"{each} in {directory}, {how}, hashes right")
    if missing := sorted(set(targets) - counts.keys()):
        text = f"this machine requires kernels for {missing[0]}, got none"
        yield Finding("kernels", "problem", text, packs.REMEDY + artifacts.or_variable())


def _examined(directory: Path) -> tuple[Counter[str], list[str], str]:
    """How many kernels it has for each target, what is wrong with them, and in which form they are."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    packed = artifacts.packed_targets(directory)
    is_loose = not packed or _files.stamp(directory / artifacts.MANIFEST_NAME) is not None
    names = [artifacts.PACKED_MANIFEST.format(target) for target in packed] + [artifacts.MANIFEST_NAME] * is_loose
    for name, target in zip(names, [*packed, None], strict=False):
        try:
            wrong += artifacts.verify_pack(directory, target) if target else artifacts.verify(directory)
            counts += Counter(map(artifacts.target_of, Manifest.read(directory / name).names))
        except ManifestError as error:
            wrong.append(str(error))
    return counts, wrong, "packed" if packed else "as files"


def _is_of_others(sentence: str, targets: Collection[str]) -> bool:
    """Whether it names a kernel or a pack of a target that this machine has no GPU for."""
    named = re.search(rf"\b({'|'.join(TARGETS)})[_.]", sentence)
    return bool(targets and named and named[1] not in targets)


def caches() -> Iterator[Finding]:
    """Where this user's tables and unpacked or compiled kernels are, if others cannot write there."""
    try:
        root = _files.cache_path()
        places = [root, *(sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else ())]
        if not root.exists():
            yield Finding("cache", "ok", f"none yet; it would be {root}")
            return
        for place in places:
            _files.check_own(place)
    except (FileError, OSError) as error:
        sentence = f"{error}; kernels are unpacked for each process anew, and no time that is measured is kept"
        yield Finding("cache", "warning", sentence)
        return
    yield Finding("cache", "ok", f"{root} is this user's alone")


def times(archs: Collection[Arch]) -> Iterator[Finding]:
    """One finding a table of measured times of these devices, the user's or the one that shipped: whether they are of
    the kernels at hand, for others do not count."""
    at_hand = {cubin[: measured.CUBIN_DIGITS] for cubin in _cubins()} if archs else set()
    for arch in dict.fromkeys(archs):
        for path in measured.paths(arch.name):
            if _files.stamp(path) is None:
                continue
            try:
                records = measured.load(path).records.values()
            except ValueError as error:
                yield Finding("times", "warning", str(error))
                continue
            num_others = sum(any(time.cubin not in at_hand for time in record.times) for record in records)
            if num_others:
                text = f"{num_others} of {len(records)} products in {path} were timed with other kernels than these"
                remedy = "the cost model decides for them until `python -m jax_bwgemm bench --tune` has measured them"
                yield Finding("times", "warning", text, remedy)
            else:
                yield Finding("times", "ok", f"{len(records)} products in {path}, timed with these kernels")


def _cubins() -> Iterator[str]:
    """The hashes of all that are at hand, whether they are whole or not."""
    for directory in artifacts.artifact_dirs():
        names = [artifacts.PACKED_MANIFEST.format(target) for target in artifacts.packed_targets(directory)]
        for name in (*names, artifacts.MANIFEST_NAME):
            if _files.stamp(directory / name) is not None:
                with contextlib.suppress(ManifestError):  # which `kernels` says
                    yield from Manifest.read(directory / name).cubins


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version)[:3])
