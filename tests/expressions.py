"""Random epilogues, as kernels, JAX functions and gradients of them are tried with: expressions of a bounded depth of
the sums, scalars, vectors along both dimensions and matrices, with up to three results, whose values float32 has well.

`choose` picks one of some: `random.Random(seed).choice`, or what Hypothesis draws.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_bwgemm.facts.epilogue import ACC, OPS, UP, Apply, Const, Epilogue, Input, Node, inputs
from jax_bwgemm.facts.problem import COARSE_DTYPES
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.facts.variant import Variant
from tests.cases import DTYPES
from tests.intervals import Arithmetic, Interval, interval, rounded

Choose = Callable[[Sequence[Any]], Any]
DEPTH, LARGEST = 4, 64.0  # of an expression; of its values
SUMS_LIMIT, OPERAND_LIMIT = 6.0, 3.0  # of magnitudes: standard normal, cut off where operands are made
SCALARS = {"alpha": 0.5, "beta": -1.25}
VECTORS = [Input("rows", "m"), Input("columns", "n"), Input("bias", "n")]
OPERANDS = [Input("factor", "one"), *VECTORS, Input("residual", "mn"), Input("gate", "mn")]
LEAVES = [*[ACC] * 5, *OPERANDS, *(Input(role, "scalar") for role in SCALARS)]
CONSTS = [Const(x) for x in (-1.5, -0.25, 0.0, 0.5, 1.0, 3.0)]
ROLES = ("second", "third")
DTYPES_OF_KERNELS = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")]


@dataclasses.dataclass
class _Maker:
    """`found`: every subexpression so far, which later results may share."""

    choose: Choose
    leaves: Sequence[Node]
    found: list[Node] = dataclasses.field(default_factory=list)

    def grow(self, depth: int) -> Node:
        """One of at most this depth."""
        if depth == 0 or self.choose([False] * 5 + [True]):
            return self.choose(self.leaves) if self.choose([True] * 4 + [False]) else self.choose(CONSTS)
        if self.found and self.choose([False] * 5 + [True]):
            return self.choose(self.found)
        op = self.choose(sorted(OPS))
        node = self._apply(op, [self.grow(depth - 1) for _ in range(OPS[op].num_args)])
        self.found.append(node)
        return node

    def reading(self, sums: Input, node: Node) -> Node:
        return node if sums in inputs(node) else self._apply("add", [node, sums])

    def _apply(self, op: str, args: list[Node]) -> Node:
        """With arguments for which it is defined, and whose errors it does not blow up."""
        if op in ("log", "sqrt", "rsqrt", "div"):
            args[-1] = Apply("add", (Apply("abs", (args[-1],)), Const(0.5)))
        if op == "exp" and _range(args[0])[1] > 3:
            args[0] = Apply("tanh", (args[0],))
        if op == "where" and not (isinstance(args[0], Apply) and args[0].op in ("gt", "ge", "eq")):
            args[0] = Apply("gt", (args[0], Const(0.0)))
        node = Apply(op, tuple(args))
        if np.abs(_range(node)).max() > LARGEST:
            node = Apply(op, tuple(Apply("tanh", (arg,)) if OPS[op].num_args < 3 else arg for arg in args))
        return node if np.abs(_range(node)).max() <= LARGEST else Apply("tanh", (node,))


def _range(node: Node) -> Interval:
    """Of all its values."""
    limits = {"acc": SUMS_LIMIT, "scalar": 2.0}
    ends = {x: np.float64(limits.get(x.place, OPERAND_LIMIT)) for x in inputs(node)}
    return interval(node, {x: (-end, end) for x, end in ends.items()}, Arithmetic())


def random_epilogue(choose: Choose, is_gated: bool = False, results: Sequence[int] = (1, 1, 2, 3)) -> Epilogue:
    """Every result reads the sums, the first of a gated one those of both b."""
    maker = _Maker(choose, [*LEAVES, *[UP] * 5] if is_gated else LEAVES)
    nodes = [maker.reading(ACC, maker.grow(DEPTH)) for _ in range(choose(results))]
    if is_gated:
        nodes[0] = maker.reading(UP, nodes[0])
    seconds = tuple(zip(ROLES, nodes[1:], strict=False))
    roles = dict.fromkeys(x.role for node in nodes for x in inputs(node) if x.place == "scalar")
    return Epilogue(nodes[0], tuple((role, SCALARS[role]) for role in roles), seconds)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of two matrices (m, k) and (k, n), or of one and two, and an epilogue; all arrays as stored."""

    epilogue: Epilogue
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    majors: str = "knn"  # of a, b and the result

    def __str__(self) -> str:
        results = "; ".join(f"{role} = {node}" for role, node in self.epilogue.results)
        return f"{self.dtype} {self.out_dtype} {self.majors} {results}"

    @property
    def is_gated(self) -> bool:
        return self.epilogue.is_gated

    def variant(self, target: str) -> Variant:
        """Its kernel, of a small tile."""
        epilogue, dtypes = self.epilogue, (self.dtype, self.dtype, self.out_dtype)
        tile = Tile(128, 128, gated=True) if self.is_gated else Tile(64, 64)
        return Variant(target, *dtypes, *self.majors[:2], tile, epilogue.out, self.majors[2], seconds=epilogue.seconds)

    def operands(self, shape: tuple[int, int, int], seed: int) -> dict[str, np.ndarray]:
        """By role: a, b, up, and what the epilogue reads."""
        (m, n, k), rng = shape, np.random.default_rng(seed)

        def normal(*size: int, dtype: str, scale: float = 1.0) -> np.ndarray:
            x = np.clip(rng.standard_normal(size), -OPERAND_LIMIT, OPERAND_LIMIT)
            return (x * scale).astype(DTYPES[dtype])

        stored = {"a": (m, k) if self.majors[0] == "k" else (k, m), "b": (k, n) if self.majors[1] == "n" else (n, k)}
        made = {"a": normal(*stored["a"], dtype=self.dtype)}
        for role in ("b", "up")[: 1 + self.is_gated]:
            made[role] = normal(*stored["b"], dtype=self.dtype, scale=k**-0.5)
        sizes = {"one": (1,), "m": (m,), "n": (n,), "mn": (m, n) if self.majors[2] == "n" else (n, m)}
        dtypes = {"one": "float32"}
        return made | {
            x.role: normal(*sizes[x.place], dtype=dtypes.get(x.place, self.out_dtype)) for x in self.epilogue.operands
        }

    def known(self, operands: Mapping[str, np.ndarray]) -> dict[Node, Interval]:
        """The epilogue's inputs, of shapes that broadcast to (m, n)."""
        known: dict[Node, Interval] = {}
        for node, role in zip((ACC, UP), ("b", "up")[: 1 + self.is_gated], strict=False):
            known[node] = self.sums(operands["a"], operands[role])
        for x in self.epilogue.operands:
            value = operands[x.role].astype(np.float64)
            value = value[:, None] if x.place == "m" else value
            value = value.T if x.place == "mn" and self.majors[2] == "m" else value
            known[x] = value, value
        for role, number in self.epilogue.scalars:
            known[Input(role, "scalar")] = np.float64(number), np.float64(number)
        return known

    def intervals(self, operands: Mapping[str, np.ndarray], of: Arithmetic) -> dict[str, Interval]:
        """Of each result."""
        known, done = self.known(operands), dict[Node, Interval]()
        return {role: interval(node, known, of, done) for role, node in self.epilogue.results}

    def sums(self, a: np.ndarray, b: np.ndarray) -> Interval:
        """However they are added: each addition loses at most a unit in the last place (tensor cores truncate) of no
        more than all terms' magnitudes."""
        left = a.astype(np.float64) if self.majors[0] == "k" else a.astype(np.float64).T
        right = b.astype(np.float64) if self.majors[1] == "n" else b.astype(np.float64).T
        exact, error = left @ right, left.shape[1] * 2.0**-23 * (np.abs(left) @ np.abs(right))
        assert np.abs(exact).max() <= SUMS_LIMIT
        return exact - error, exact + error

    def check(
        self, results: Mapping[str, np.ndarray], operands: Mapping[str, np.ndarray], of: Arithmetic | None = None
    ) -> None:
        """Asserts that every element of every result, (m, n), is in its interval: of a kernel's, if nothing is said."""
        of = of or Arithmetic(self.out_dtype in COARSE_DTYPES)
        for role, found in self.intervals(operands, of).items():
            got, (low, high) = np.asarray(results[role], np.float64), rounded(found, DTYPES[self.out_dtype])
            wrong = ~((got >= low) & (got <= high))
            if wrong.any():
                at = tuple(np.argwhere(wrong)[0])
                low, high = (np.broadcast_to(x, got.shape)[at] for x in (low, high))
                raise AssertionError(f"{wrong.sum()} of {role} of {self}: {got[at]} at {at} is not in {low} to {high}")


def random_product(choose: Choose) -> Product:
    """For a kernel: of any dtypes and majors."""
    epilogue = random_epilogue(choose, is_gated=choose([False] * 5 + [True]))
    majors = choose(["kn", "kk", "mn"]) + choose(["n", "n", "m"])
    return Product(epilogue, *choose(DTYPES_OF_KERNELS), majors)


def seeded(seed: int) -> Product:
    """Always the same."""
    return random_product(random.Random(seed).choice)
