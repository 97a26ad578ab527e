"""Emits again, of other values, what a module has had emitted before: the same operations, whatever was thought to make
them.

A model multiplies alike in each of its layers. JAX would share a lowered rule as a function, which hides from our rules
where their operands come from; so ours are not shared, and what they emit is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir

from jax_bwgemm.ops.origins import defining_op

_Place = tuple[int, int]  # (step that made a value, which of its results); (-1, i): the i-th value that is given


@dataclasses.dataclass(frozen=True)
class _Step:
    """An operation. Of the module it has only types and attributes, which live as long as the module's context."""

    name: str
    types: tuple[Any, ...]
    attributes: dict[str, Any]
    operands: tuple[_Place, ...]


@dataclasses.dataclass(frozen=True)
class Emitted:
    """Operations without regions, which make `results` of what is given."""

    steps: tuple[_Step, ...]
    results: tuple[_Place, ...]

    @classmethod
    def of(cls, given: Sequence[Any], results: Sequence[Any]) -> Emitted | None:
        """What made `results`, of the values that are `given`. None where it cannot be emitted again: an operation
        with a body, as a loop, or of a value that was not given."""
        places: dict[Any, _Place] = {value: (-1, i) for i, value in enumerate(given)}
        steps: list[_Step] = []

        def visit(value: Any) -> bool:
            op = defining_op(value)
            if op is None or len(op.regions):
                return False
            operands = list(op.operands)
            if not all(x in places or visit(x) for x in operands):
                return False
            made, said = list(op.results), op.attributes
            attributes = {name: said[name] for name in said}
            types, places_of = tuple(x.type for x in made), tuple(places[x] for x in operands)
            places.update({result: (len(steps), i) for i, result in enumerate(made)})
            steps.append(_Step(op.name, types, attributes, places_of))
            return True

        if not all(x in places or visit(x) for x in results):
            return None
        return cls(tuple(steps), tuple(places[x] for x in results))

    def again(self, given: Sequence[Any]) -> list[Any]:
        """The results of other values of the same types, emitted here and now."""
        made: list[Any] = []

        def value(place: _Place) -> Any:
            return given[place[1]] if place[0] < 0 else made[place[0]].results[place[1]]

        for step in self.steps:
            operands = [value(place) for place in step.operands]
            made.append(
                ir.Operation.create(step.name, results=step.types, operands=operands, attributes=step.attributes)
            )
        return [value(place) for place in self.results]
