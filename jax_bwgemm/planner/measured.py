"""Tables of measured times: what they hold, where they are, how they are read, merged and written.

Times nothing and chooses nothing. A time is of one cubin: whoever uses it checks that it is the one at hand.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_bwgemm import _files
from jax_bwgemm._files import FileError, Stamp
from jax_bwgemm._version import __version__
from jax_bwgemm.facts.epilogue import Epilogue, Moves
from jax_bwgemm.facts.problem import DTYPE_SHORT, Problem

FORMAT = 1
COMMAND = "python -m jax_bwgemm bench --tune --table FILE"
REMEDY = f"remove the file, or measure again: `{COMMAND}`"
CUBIN_DIGITS = 12  # of a cubin's sha256: enough to tell builds apart
MOST_BYTES = 2**24  # of a table; of 230 problems: 2**17
SHIPPED = Path(__file__).parent / "tables"
_DATE = "%Y-%m-%dT%H:%M:%SZ"
_KEY = re.compile(r"\d+\*\d+x\d+x\d+ a:\d+:\w+:[km] b:\d+:\w+:[nk] c:\w+:[nm] \w+( promoted)?( symmetric)?")
_HEADER = {"format", "arch", "package_version", "command", "machine", "records"}


@dataclasses.dataclass(frozen=True)
class Time:
    """Microseconds of one kernel, without what pads its operands; `cubin` begins the sha256 of what was timed. `order`:
    of its tiles (raster_group, raster_along_n), if it is faster in another than the planner's."""

    tile: str
    swapped: bool
    us: float
    cubin: str
    order: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """The times of one problem's kernels, the fastest first. `problem` is its `key`, `date` the latest time's, UTC.
    `xla_us`: what XLA took by its default flags, timed as these were, if it was."""

    problem: str
    date: str
    times: tuple[Time, ...]
    xla_us: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """What was measured on one `arch`, by `Record.problem`; `machine` describes where the last of it was."""

    arch: str
    machine: dict[str, str]
    records: dict[str, Record]


def key(problem: Problem) -> str:
    """`1*64x64x64 a:1:bf16:k b:1:bf16:n c:bf16:n relu`: a problem, but for the value of an epilogue's scale."""
    a, b, c = (DTYPE_SHORT[dtype] for dtype in (problem.a_dtype, problem.b_dtype, problem.out_dtype))
    sizes = f"{problem.batch}*{problem.m}x{problem.n}x{problem.k}"
    operands = f"a:{problem.a_batch}:{a}:{problem.a_major} b:{problem.b_batch}:{b}:{problem.b_major}"
    kinds = (" promoted" if problem.promoted else "") + (" symmetric" if problem.symmetric else "")
    return f"{sizes} {operands} c:{c}:{problem.c_major} {problem.epilogue.kind}{kinds}"


def stand_in(problem: Problem) -> Problem | None:
    """The product alone, if its times hold for `problem` as well: a bias, a relu or a scale is arithmetic on a result
    that is in registers already. Not so matrices and further results, which are moved, a second b, or a gate, which
    takes of some tiles' time and not of others'."""
    epilogue = problem.epilogue
    takes_time = any(op.coarse or op.fine or op.instructions for op in epilogue.ops())
    if epilogue.moves != Moves() or epilogue.is_gated or takes_time:
        return None
    return dataclasses.replace(problem, epilogue=Epilogue())


def now() -> str:
    """The date of a record."""
    return datetime.datetime.now(datetime.UTC).strftime(_DATE)


def shipped_path(arch: str) -> Path:
    return SHIPPED / f"{arch}.json"


def user_path(arch: str) -> Path:
    """In the directory that `JAX_BWGEMM_TABLES` names, else in the user's cache; ValueError without either."""
    path = _user_path(arch, *map(os.environ.get, _VARIABLES))
    if path is None:
        raise ValueError("a table of times requires a directory, got no home: set JAX_BWGEMM_TABLES")
    return path


_VARIABLES = "JAX_BWGEMM_TABLES", "XDG_CACHE_HOME", "HOME"


@functools.lru_cache(maxsize=64)
def _user_path(arch: str, named: str | None, cache: str | None, home: str | None) -> Path | None:
    if named:
        return Path(named) / f"{arch}.json"
    try:
        return _files.cache_path("tables", f"{arch}.json")
    except FileError:
        return None


def paths(arch: str) -> Iterator[Path]:
    """Of the tables that there may be: the user's, if there is a home, and the one that shipped."""
    user = _user_path(arch, *map(os.environ.get, _VARIABLES))
    yield from (path for path in (user, shipped_path(arch)) if path)


def found(arch: str, problem: Problem) -> Iterator[Record]:
    """What was measured of `problem`: the user's record, then the one that shipped. A broken table is a warning."""
    name = key(problem)
    for path in paths(arch):
        if record := _records(path, arch, _files.stamp(path)).get(name):
            yield record


def state(arch: str) -> tuple[object, ...]:
    """Of both tables, what changes with them."""
    return tuple((path, _files.stamp(path)) for path in paths(arch))


def shipped(arch: str, problem: Problem) -> Record | None:
    """What shipped of `problem`, or of what stands in for it, whichever cubins are at hand."""
    path = shipped_path(arch)
    records = _records(path, arch, _files.stamp(path))
    return next(
        (records[key(asked)] for asked in (problem, stand_in(problem)) if asked and key(asked) in records), None
    )


def load(path: Path) -> Table:
    """Raises ValueError for what is no table of this format."""
    try:
        fields: dict[str, Any] = _files.read_json(path, MOST_BYTES)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"format {FORMAT} is required")
        if fields.keys() != _HEADER:
            raise ValueError(f"the keys {sorted(_HEADER)} are required, got {sorted(fields)}")
        records = [_record(record) for record in fields["records"]]
        return Table(fields["arch"], fields["machine"], {record.problem: record for record in records})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a table of times requires what this version writes, got {path}: {error}; {REMEDY}") from None


def merge(old: Table, new: Table) -> Table:
    """Both tables' records. Of a problem in both, each kernel's newer time, and XLA's; all from the newer record where
    the two timed different cubins, for times of different builds do not compare. ValueError for two archs."""
    if old.arch != new.arch:
        raise ValueError(f"a merge requires tables of one arch, got {old.arch} and {new.arch}")
    both = {name: _merged(old.records[name], record) for name, record in new.records.items() if name in old.records}
    return dataclasses.replace(new, records=old.records | new.records | both)


def save(table: Table, path: Path) -> None:
    """Merges `table` into the file, which is whole at any time; one that is broken is set aside as `FILE.broken`.

    Of two processes that save at once, one may overwrite what the other has just added.
    """
    if _is_cached(path):
        _files.make_own(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    if _files.stamp(path) is not None:
        try:
            old = load(path)
        except ValueError:
            path.replace(path.with_name(f"{path.name}.broken"))
        else:
            table = merge(old, table)
    _files.write_atomically(path, _text(table).encode())


def _is_cached(path: Path) -> bool:
    """Whether it is the table of the user's cache, where nobody else may write, and none that the user named."""
    return not os.environ.get("JAX_BWGEMM_TABLES") and path == _user_path(path.stem, *map(os.environ.get, _VARIABLES))


def _merged(one: Record, other: Record) -> Record:
    older, newer = sorted((one, other), key=lambda record: record.date)
    timed = {(time.tile, time.swapped): time for time in older.times}
    for time in newer.times:
        if timed.get((time.tile, time.swapped), time).cubin != time.cubin:
            return newer
        timed[time.tile, time.swapped] = time
    times = tuple(sorted(timed.values(), key=lambda time: time.us))
    return dataclasses.replace(newer, times=times, xla_us=newer.xla_us or older.xla_us)


def _record(fields: Mapping[str, Any]) -> Record:
    record = Record(fields["problem"], fields["date"], tuple(map(_time, fields["times"])), fields.get("xla_us"))
    datetime.datetime.strptime(record.date, _DATE)
    if not _KEY.fullmatch(record.problem):
        raise ValueError(f"a problem requires the form of `measured.key`, got {record.problem!r}")
    if record.xla_us is not None and not _is_time(record.xla_us):
        raise ValueError(f"XLA's time requires microseconds, got {record.xla_us!r}")
    for time in record.times:
        types = [type(value) for value in (time.tile, time.swapped, time.cubin)]
        if types != [str, bool, str] or not _is_time(time.us) or not _is_order(time.order):
            raise ValueError(
                "a time requires a tile, whether it is swapped, microseconds, a cubin and, if it has one, an order of "
                f"tiles, got {time}"
            )
    return record


def _time(values: Sequence[Any]) -> Time:
    tile, swapped, us, cubin, *order = values
    return Time(tile, swapped, us, cubin, *map(tuple, order))


def _is_time(us: Any) -> bool:
    return type(us) is float and 0 < us < math.inf


def _is_order(order: tuple[Any, ...] | None) -> bool:
    """How wide groups of tiles are, at least one, and along which side."""
    if order is None:
        return True
    return [type(value) for value in order] == [int, int] and 1 <= order[0] < 2**31 and order[1] in (0, 1)


def _text(table: Table) -> str:
    """JSON with a line for each record."""
    header = {"format": FORMAT, "arch": table.arch, "package_version": __version__, "command": COMMAND}
    head = json.dumps(header | {"machine": table.machine}, indent=1).removesuffix("\n}")
    lines = [json.dumps(_fields(table.records[name])) for name in sorted(table.records)]
    return f'{head},\n "records": [\n' + ",\n".join(lines) + "\n]}\n"


def _fields(record: Record) -> dict[str, Any]:
    times = [
        [time.tile, time.swapped, round(time.us, 3), time.cubin, *([time.order] if time.order else [])]
        for time in record.times
    ]
    xlas = {} if record.xla_us is None else {"xla_us": round(record.xla_us, 3)}
    return {"problem": record.problem, "date": record.date, "times": times} | xlas


@functools.lru_cache(maxsize=16)
def _records(path: Path, arch: str, stamp: Stamp | None) -> Mapping[str, Record]:
    """Read once for each state of the file, so that a broken one is one warning."""
    if stamp is None:
        return {}
    try:
        if _is_cached(path):
            _files.check_own(path.parent)
        table = load(path)
        if table.arch != arch:
            raise ValueError(f"{path} requires times of {arch}, got {table.arch}; {REMEDY}")
    except ValueError as error:
        warnings.warn(f"the measured times of {path} are not used: {error}", stacklevel=2)
        return {}
    return table.records
