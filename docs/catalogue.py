"""Tables of what ships, made from the catalogue and the records of devices when the documentation is built.

A Sphinx extension: the directive `shipped` with the name of a table.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.problem import DTYPE_SHORT
from jax_bwgemm.facts.variant import Variant
from jax_bwgemm.kernels.aot.catalog import catalogue

Rows = list[tuple[str, ...]]
Dtypes = tuple[str, str, str]  # of a, b and the result
FORMS = {"kn": "nn", "kk": "nt", "mn": "tn", "mk": "tt"}  # by the majors of a and b; t: transposed
GRADIENTS = "of a layer's gradient"


def _columns() -> dict[str, tuple[str, ...]]:
    """The devices that run the same targets' kernels, and these."""
    found: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for arch in ARCHS.values():
        found[arch.targets].append(arch.name.upper())
    return {", ".join(names): targets for targets, names in found.items()}


COLUMNS = _columns()


def operands() -> Rows:
    """Operands, result, and for each device the forms whose product alone a kernel computes of operands as they lie."""
    found: dict[Dtypes, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for variant in catalogue():
        if variant.steps.is_identity:
            found[dtypes(variant)][variant.target].add(form(variant))
    rows: Rows = [("operands", "result", *COLUMNS)]
    places = {pair: i for i, pair in enumerate(dict.fromkeys((a, b) for a, b, _ in found))}
    for (a, b, out), targets in sorted(found.items(), key=lambda item: places[item[0][:2]]):
        sets = [set().union(*(targets[target] for target in column)) for column in COLUMNS.values()]
        own = [" ".join(x for x in FORMS.values() if x in forms) or "none" for forms in sets]
        rows.append((a if a == b else f"{a} by {b}", out, *own))
    return rows


def epilogues() -> Rows:
    """Epilogue, and for each device the operands of which a kernel has it; the result is of the same dtype unless
    said."""
    found: dict[str, dict[str, dict[str, None]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for variant in catalogue():
        if not variant.steps.is_identity:
            a, _, out = (DTYPE_SHORT[dtype] for dtype in dtypes(variant))
            found[_words(_steps(variant).kind)][variant.target][a if a == out else f"{a} to {out}"] = None
    rows: Rows = [("epilogue", *COLUMNS)]
    order = sorted(found, key=lambda words: (words == GRADIENTS, words.count(",")))
    for words in order:
        sets = [{dtype for target in column for dtype in found[words][target]} for column in COLUMNS.values()]
        rows.append((words, *(", ".join(sorted(own)) or "none" for own in sets)))
    return rows


def devices() -> Rows:
    """The devices that are planned for, with the source of what is known of them."""
    rows: Rows = [("device", "target", "SMs", "GHz", "bfloat16, TFLOP/s", "memory, TB/s", "source")]
    for arch in ARCHS.values():
        sizes = arch.num_sms, arch.clock_ghz, f"{arch.peak_tflops:.0f}", arch.memory_tb_per_s
        rows.append((f"`{arch.name}`", ", ".join(arch.targets), *map(str, sizes), arch.source))
    return rows


def dtypes(variant: Variant) -> Dtypes:
    """As the caller has them: a product that is computed as its transpose has its operands the other way round."""
    a, b = variant.a_dtype, variant.b_dtype
    return (a, b, variant.out_dtype) if variant.c_major == "n" else (b, a, variant.out_dtype)


def form(variant: Variant) -> str:
    """nn: `x @ w`; nt: `x @ w.T`; tn: `x.T @ w`; tt: `x.T @ w.T`; as the caller has them."""
    a, b = variant.a_major, variant.b_major
    if variant.c_major == "m":
        a, b = {"k": "k", "n": "m"}[b], {"k": "k", "m": "n"}[a]
    return FORMS[a + b]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def _steps(variant: Variant) -> Any:
    return variant.steps if variant.c_major == "n" else variant.steps.transposed


def _words(kind: str) -> str:
    """`bias_gelu` as "bias, gelu"; what no caller writes has one name."""
    if "expr" in kind or "before" in kind:
        return GRADIENTS
    if kind.endswith("_gate"):
        return f"gated {kind.removesuffix('_gate')}"
    return kind.replace("_", ", ")


TABLES: dict[str, Callable[[], Rows]] = {"operands": operands, "epilogues": epilogues, "devices": devices}


def setup(app: Any) -> dict[str, bool]:
    from sphinx.util.docutils import SphinxDirective

    class Shipped(SphinxDirective):
        required_arguments = 1

        def run(self) -> Any:
            return self.parse_text_to_nodes(markdown(TABLES[self.arguments[0]]()))

    app.add_directive("shipped", Shipped)
    return {"parallel_read_safe": True}
