"""What a kernel is made from: a digest of the compiler's version and of the code that runs when it is built.

Code is what Python parses, without docstrings and comments: prose rebuilds nothing. Never imports the compiler.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
from pathlib import Path

from jax_bwgemm.facts.arch import family_of
from jax_bwgemm.facts.repack import Repack
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.runtime.artifacts import COMPILER

DSL = "nvidia-cutlass-dsl"
ROOT = "kernels.aot.worker"  # makes a variant's entry, which follows from what this imports, at any depth
OWN = {  # of one kind alone
    "hopper": ("kernels.aot.compile", "kernels.sm90", "kernels.sm90_direct", "kernels.sm90_thin"),
    "blackwell": ("kernels.aot.compile", "kernels.sm100"),
    "repack": ("kernels.repack",),
}
# Of files (their format has a number), of plans: of no bytes.
NOT_SOURCES = {"_files", "runtime.artifacts", "facts.constants", "facts.legality"}
_PACKAGE = Path(__file__).parents[2]


def source_sha256(kernel: Variant | Repack) -> str:
    """Of everything that the kernel's bytes and its facts in the manifest follow from, its own fields aside."""
    kind = "repack" if isinstance(kernel, Repack) else family_of(kernel.target).name
    return _digest(kind, dsl_version(), _PACKAGE)


def dsl_version() -> str:
    try:
        return importlib.metadata.version(DSL)
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"the build requires {DSL}, got none; `pip install {COMPILER}`", name=DSL) from None


def modules(kind: str, package: Path = _PACKAGE) -> dict[str, str]:
    """{module of the package: its code} of a kind of kernels, those of the other kinds left out."""
    others = {name for names in OWN.values() for name in names if name not in OWN[kind]}
    found: dict[str, str] = {}
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        path = package / (name.replace(".", "/") + ".py")
        if name not in found and name not in others | NOT_SOURCES and path.exists():
            tree = ast.parse(path.read_text())
            waiting += _imports(tree)
            found[name] = ast.dump(_without_docstrings(tree))
    return dict(sorted(found.items()))


@functools.cache
def _digest(kind: str, dsl: str, package: Path) -> str:
    digest = hashlib.sha256(dsl.encode())
    for name, code in modules(kind, package).items():
        digest.update(f"{name}\0{code}\0".encode())
    return digest.hexdigest()


def _imports(tree: ast.Module) -> list[str]:
    """Modules of the package that a file imports anywhere in it; a name that is no module has no file."""
    prefix, found = f"{_PACKAGE.name}.", []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name.removeprefix(prefix) for name in found if name.startswith(prefix)]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]
    return tree
