"""Programs with a random mistake in them: each runs, or is refused with its line, and nothing of Python's escapes.

    python -m tests.emu.fuzz [--count 10000] [--seed 0]

prints what escaped, by the place in the emulator that raised it. `tests/emu/test_fuzz.py` runs a few hundred.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np

from jax_bwgemm.emulator import EmulatorError, Launch, LaunchError, Memory, Schedule, parse, run
from tests.emu import mma, test_tmem
from tests.emu.snippet import module_text
from tests.snippets import cancel, catalogue
from tests.snippets.kit import MapOf

BUDGET = 20_000  # warp instructions; programs that run take some 1,000
NUMBERS = ("0", "1", "-1", "3", "31", "32", "33", "64", "255", "4096", "65535", "16777216", "2147483647", "2147483648",
           "4294967295", "4294967296", "-9223372036854775808", "18446744073709551615", "18446744073709551616",
           "9" * 30, "0x7F", "0xFFFFFFFF", "0f7F800000", "0d7FF8000000000000", "010", "1U")  # fmt: skip
MODIFIERS = re.findall(
    r"\S+",
    """
    u8 s8 b8 u16 s16 b16 u32 s32 b32 u64 s64 b64 b128 f16 bf16 f32 f64 f16x2 bf16x2 f32x2 pred e4m3x2 e5m2x2 tf32 lo
    hi wide rn rz ftz sat approx eq lt and or xor idx bfly x1 x2 x3 x4 x128 v2 v4 v8 sync aligned relaxed acquire
    release cta cluster gpu shared global param shared::cta shared::cluster parity expect_tx trans m8n8 1d 2d 3d
    tile multicast::cluster cta_group::1 cta_group::2 kind::f16 kind::i8 read 32x32b 16x256b all any ballot
    """,
)
TOKEN = re.compile(r"[%$]?\w[\w:.]*|\s+|.", re.S)


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel and its launch. `arrays` are copied for each run; `maps` are of their addresses."""

    name: str
    text: str
    arrays: tuple[np.ndarray, ...]
    maps: tuple[MapOf, ...] = ()
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    threads: int = 32
    smem_bytes: int = 1 << 14

    def run(self, text: str, schedule: Schedule | None = None) -> None:
        memory = Memory()
        addresses = tuple(memory.register(array.copy(), f"p{i}") for i, array in enumerate(self.arrays))
        params = (*addresses, *(of.at(addresses) for of in self.maps))
        launch = Launch(self.grid, (self.threads, 1, 1), params, self.cluster, self.smem_bytes)
        run(parse(text), launch, memory, schedule, max_instructions=BUDGET)


@functools.cache
def programs() -> list[Program]:
    """The snippets, and products and transfers of TMEM."""
    found = [
        Program(s.name, s.text(), s.arrays(), s.maps, s.grid, s.cluster, s.threads, s.smem_bytes)
        for s in (*catalogue.ALL, *cancel.snippets())
    ]
    calls: dict[str, Callable[[], object]] = {
        f"mma-{kind}-{group}": functools.partial(mma.run_tcgen05, kind, group, 128 * group, 64, False, True, 0)
        for kind, group in (("bf16", 1), ("e4m3", 2), ("s8", 1))
    }
    calls["copy"] = functools.partial(test_tmem.run_copy, "128x128b")
    calls["transfer"] = functools.partial(
        test_tmem.transfer, "tcgen05.ld.sync.aligned.16x128b.x2.b32 {%r200, %r201, %r202, %r203}, [%r25];", 4
    )
    return found + [_recorded(name, call) for name, call in calls.items()]


def _recorded(name: str, call: Callable[[], object]) -> Program:
    """The program that a test's helper would run."""
    with mock.patch.object(mma, "run_snippet") as one, mock.patch.object(test_tmem, "run_snippet") as other:
        call()
    (body, arrays), options = one.call_args or other.call_args
    size, threads = options.get("cluster", 1), options.get("threads", 32)
    text = module_text(body, tuple(range(len(arrays))), threads)
    cluster = (size, 1, 1)
    return Program(name, text, arrays, (), cluster, cluster, threads, options.get("smem_bytes", 1 << 16))


def mutant(text: str, rng: random.Random) -> str:
    """One to three mistakes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(MUTATIONS)(text, rng)
    return text


def _tokens(text: str) -> list[str]:
    return TOKEN.findall(text)


def _pick(tokens: list[str], rng: random.Random, pattern: str) -> int | None:
    found = [i for i, token in enumerate(tokens) if re.fullmatch(pattern, token)]
    return rng.choice(found) if found else None


def _replaced(pattern: str, choose: Callable[[list[str], str, random.Random], str]) -> Callable[..., str]:
    """A mutation of one token of a form."""

    def mutate(text: str, rng: random.Random) -> str:
        tokens = _tokens(text)
        at = _pick(tokens, rng, pattern)
        if at is not None:
            tokens[at] = choose(tokens, tokens[at], rng)
        return "".join(tokens)

    return mutate


def _another(tokens: list[str], token: str, rng: random.Random) -> str:
    """Of the same kind, by its first character; or any."""
    kin = [t for t in tokens if not t.isspace() and (t[0] == token[0] or rng.random() < 0.05)]
    return rng.choice(kin)


def _modified(tokens: list[str], token: str, rng: random.Random) -> str:
    parts = token.split(".")
    at = rng.randrange(1, len(parts) + 1)
    action = rng.randrange(3)
    if action == 0 and at < len(parts):
        del parts[at]
    elif action == 1 and at < len(parts):
        parts[at] = rng.choice(MODIFIERS)
    else:
        parts.insert(at, rng.choice(MODIFIERS))
    return ".".join(parts)


def _statements(text: str, rng: random.Random) -> str:
    """Leaves one out, doubles it, moves it, or swaps two."""
    pieces = text.split(";")
    a, b = rng.randrange(len(pieces)), rng.randrange(len(pieces))
    action = rng.randrange(4)
    if action == 0:
        del pieces[a]
    elif action == 1:
        pieces.insert(a, pieces[a])
    elif action == 2:
        pieces.insert(b, pieces.pop(a))
    else:
        pieces[a], pieces[b] = pieces[b], pieces[a]
    return ";".join(pieces)


def _guarded(text: str, rng: random.Random) -> str:
    """A guard for an instruction, perhaps one that nobody writes."""
    pieces = text.split(";")
    at = rng.randrange(1, len(pieces))
    guard = f"@{rng.choice(('', '!'))}%{rng.choice('pprhd')}{rng.randrange(33)} "
    pieces[at] = re.sub(r"^(\s*(?:\w+:\s*)?)(?:@!?%\w+ )?", lambda match: match[1] + guard, pieces[at])
    return ";".join(pieces)


def _character(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(("", "", text[at] * 2, rng.choice("{}[]();:,.@!%|<>+-_ \n09xU"))) + text[at + 1 :]


MUTATIONS: tuple[Callable[[str, random.Random], str], ...] = (
    _replaced(r"-?\d.*", lambda tokens, token, rng: rng.choice(NUMBERS)),
    _replaced(r"%\w+", lambda tokens, token, rng: rng.choice(("", "_", *[_another(tokens, token, rng)] * 6))),
    _replaced(r"%\w+", lambda tokens, token, rng: rng.choice(NUMBERS)),
    _replaced(r"[^\s]+", _another),
    _replaced(r"[^\s]+", lambda tokens, token, rng: rng.choice(("", f"{token} {token}", f"{token}, {token}"))),
    _replaced(r"[a-z]\w*\.[\w.:]+", _modified),
    _replaced(r"[a-z]\w*\.[\w.:]+", _modified),
    _statements,
    _guarded,
    _character,
)


@dataclasses.dataclass(frozen=True)
class Escape:
    """An error that is not the emulator's own, or names no line."""

    program: str
    text: str
    error: BaseException

    @property
    def place(self) -> str:
        frames = traceback.extract_tb(self.error.__traceback__)
        last = next(f for f in reversed(frames) if "emulator" in f.filename or "fuzz" in f.filename)
        return f"{type(self.error).__name__} at {last.filename.rpartition('/')[2]}:{last.lineno}: {last.line}"


def escapes(count: int, seed: int) -> Iterator[Escape | None]:
    """What became of each mutant: None for one that ran or was refused with its line."""
    for i in range(count):
        rng = random.Random(f"{seed}-{i}")
        program = rng.choice(programs())
        text = mutant(program.text, rng)
        yield outcome(program, text, rng.choice((Schedule(), Schedule.standard(i)[4])))


def outcome(program: Program, text: str, schedule: Schedule | None = None) -> Escape | None:
    try:
        program.run(text, schedule)
    except EmulatorError as error:
        names_line = isinstance(error, LaunchError) or re.search(r"PTX line \d+", str(error))
        return None if names_line else Escape(program.name, text, error)
    except Exception as error:  # noqa: BLE001 - what escapes is the finding
        return Escape(program.name, text, error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    by_place: dict[str, list[Escape]] = collections.defaultdict(list)
    for found in escapes(args.count, args.seed):
        if found is not None:
            by_place[found.place].append(found)
    for place, group in sorted(by_place.items(), key=lambda item: -len(item[1])):
        print(f"{len(group)} {place}\n    {group[0].program}: {group[0].error}")
    print(f"{sum(map(len, by_place.values()))} of {args.count} mutants escaped")
    return 1 if by_place else 0


if __name__ == "__main__":
    sys.exit(main())
