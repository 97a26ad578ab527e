"""Damaged JSON: what a bad disk, a bad editor or an ill will make of a file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

WRONG = (None, True, -1, 1.5, "", "x", "\ud800", [], {}, [[]], {"name": 3}, 10**400, "1" * 5000)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a tree of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes(item, (*path, key))


def mutant(content: bytes, rng: random.Random) -> bytes:
    """With some bytes changed, cut out or put in; or with another value, or none, somewhere in its tree."""
    if rng.random() < 0.5:
        start = rng.randrange(len(content))
        end = min(len(content), start + rng.choice((0, 1, 1, 2, 30)))
        cut = rng.choice((content[:start], content[:start] + rng.randbytes(end - start or 1) + content[end:]))
        return rng.choice((cut, content[:start] + content[end:]))
    tree = copy.deepcopy(json.loads(content))
    path = rng.choice([path for path in nodes(tree) if path])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    if rng.random() < 0.2:
        del parent[path[-1]]
    else:
        parent[path[-1]] = rng.choice(WRONG)
    return json.dumps(tree).encode()
