"""Tables of measured times: keys, files that are whole or broken, merging; and where they are looked for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pwd
import random
import stat
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from mutants import mutant
from privileges import forbidden

from jax_bwgemm.facts.arch import ARCHS
from jax_bwgemm.facts.epilogue import chain
from jax_bwgemm.facts.problem import Problem
from jax_bwgemm.facts.tile import Tile
from jax_bwgemm.planner import measured
from jax_bwgemm.planner.measured import Record, Table, Time
from tests.fuzz import SEED, fuzz, rounds

PROBLEM = Problem(64, 128, 256)
FAST = Time("128x256x64_cta1_cluster2x1", False, 10.0, "aaaaaaaaaaaa")
SLOW = Time("128x128x64_cta1_cluster1x1", False, 20.0, "bbbbbbbbbbbb")
SWAPPED = Time("128x64x64_cta1_cluster1x1", True, 15.0, "cccccccccccc")


def record(*times: Time, day: int = 1, problem: Problem = PROBLEM, xla_us: float | None = None) -> Record:
    return Record(measured.key(problem), f"2026-01-{day:02}T00:00:00Z", times, xla_us)


def table(*records: Record, arch: str = "h200", **facts: str) -> Table:
    return Table(arch, facts, {record.problem: record for record in records})


@pytest.fixture
def user_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAX_BWGEMM_TABLES", str(tmp_path / "user"))
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "user"


def test_every_field_of_a_problem_is_in_its_key() -> None:
    changes: list[dict[str, Any]] = [
        {"m": 65}, {"n": 129}, {"k": 257}, {"batch": 3, "a_batch": 3}, {"batch": 3, "b_batch": 3},
        {"a_dtype": "float16"}, {"b_dtype": "float16"}, {"out_dtype": "float32"}, {"a_major": "m"}, {"b_major": "k"},
        {"c_major": "m"}, {"epilogue": chain(2.0)}, {"epilogue": chain(1.0, True, "relu", True)},
    ]  # fmt: skip
    keys = [measured.key(dataclasses.replace(PROBLEM, **change)) for change in [{}, *changes]]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "1*64x128x256 a:1:bf16:k b:1:bf16:n c:bf16:n identity"
    scales = (dataclasses.replace(PROBLEM, epilogue=chain(alpha)) for alpha in (2.0, 3.0))
    assert len({measured.key(scaled) for scaled in scales}) == 1  # no kernel depends on the value


def test_a_file_is_what_was_saved(tmp_path: Path) -> None:
    ordered = dataclasses.replace(SLOW, order=(8, 1))
    other = record(ordered, problem=Problem(1, 2, 3, epilogue=chain(1.0, True)))
    saved = table(record(FAST, SWAPPED, xla_us=9.5), other, name="NVIDIA H200")
    measured.save(saved, tmp_path / "new" / "h200.json")
    assert measured.load(tmp_path / "new" / "h200.json") == saved
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["h200.json"]  # no scratch is left
    fields = json.loads((tmp_path / "new" / "h200.json").read_text())
    assert fields["command"].startswith("python -m jax_bwgemm bench --tune") and fields["package_version"]


def test_the_date_is_one_that_can_be_read(tmp_path: Path) -> None:
    measured.save(table(dataclasses.replace(record(FAST), date=measured.now())), tmp_path / "t.json")
    assert measured.load(tmp_path / "t.json").records


def test_merging_takes_the_newer_time_of_each_kernel() -> None:
    old, again = record(FAST, SLOW, day=1), record(dataclasses.replace(FAST, us=30.0), SWAPPED, day=2)
    for one, other in ((old, again), (again, old)):
        (merged,) = measured.merge(table(one), table(other)).records.values()
        assert merged == record(SWAPPED, SLOW, dataclasses.replace(FAST, us=30.0), day=2)


@pytest.mark.parametrize(("old_us", "new_us", "us"), [(None, None, None), (9.0, None, 9.0), (9.0, 8.0, 8.0)])
def test_merging_takes_the_newer_time_of_xla(old_us: float | None, new_us: float | None, us: float | None) -> None:
    old, new = table(record(FAST, xla_us=old_us)), table(record(FAST, day=2, xla_us=new_us))
    assert measured.merge(old, new) == measured.merge(new, old) == table(record(FAST, day=2, xla_us=us))


def test_xlas_time_beside_another_build_is_dropped() -> None:
    rebuilt = table(record(dataclasses.replace(FAST, cubin="ffffffffffff"), day=2))
    assert measured.merge(table(record(FAST, xla_us=9.0)), rebuilt) == rebuilt


def test_merging_keeps_other_problems_and_the_newer_machine() -> None:
    other = record(SLOW, problem=Problem(1, 2, 3))
    merged = measured.merge(table(record(FAST), date="old"), table(other, date="new"))
    assert merged == table(record(FAST), other, date="new")


def test_times_of_different_builds_are_not_mixed() -> None:
    rebuilt = record(dataclasses.replace(SLOW, cubin="ffffffffffff"), day=2)
    assert measured.merge(table(record(FAST, SLOW)), table(rebuilt)) == table(rebuilt)
    assert measured.merge(table(rebuilt), table(record(FAST, SLOW))) == table(rebuilt)


def test_merging_requires_one_arch(tmp_path: Path) -> None:
    measured.save(table(record(FAST)), tmp_path / "t.json")
    with pytest.raises(ValueError, match="a merge requires tables of one arch, got h200 and b200"):
        measured.save(table(record(SLOW), arch="b200"), tmp_path / "t.json")
    assert measured.load(tmp_path / "t.json") == table(record(FAST))


def damages() -> dict[str, Any]:
    def of_record(**changes: Any) -> Any:
        return lambda fields: fields["records"][0].update(changes)

    return {
        "format": lambda fields: fields.update(format=99),
        "unknown key": lambda fields: fields.update(unknown=1),
        "missing key": lambda fields: fields.pop("machine"),
        "missing times": lambda fields: fields["records"][0].pop("times"),
        "problem": of_record(problem="64x128x256"),
        "date": of_record(date="yesterday"),
        "short time": of_record(times=[["t", False, 1.0]]),
        "endless time": of_record(times=[["t", False, float("inf"), "c"]]),
        "zero time": of_record(times=[["t", False, 0.0, "c"]]),
        "no time": of_record(times=[["t", False, float("nan"), "c"]]),
        "an endless time of XLA's": of_record(xla_us=float("inf")),
        "a time of XLA's in words": of_record(xla_us="9"),
        "a time of XLA's before it starts": of_record(xla_us=-1.0),
        "swapped": of_record(times=[["t", "no", 1.0, "c"]]),
        "an order of one": of_record(times=[["t", False, 1.0, "c", [8]]]),
        "an order of no tiles": of_record(times=[["t", False, 1.0, "c", [0, 1]]]),
        "an order without end": of_record(times=[["t", False, 1.0, "c", [2**31, 1]]]),
        "an order along k": of_record(times=[["t", False, 1.0, "c", [8, 2]]]),
        "an order by name": of_record(times=[["t", False, 1.0, "c", ["8", 1]]]),
        "an order and more": of_record(times=[["t", False, 1.0, "c", [8, 1], 2]]),
    }


@pytest.mark.parametrize("damage", damages().values(), ids=damages())
def test_a_broken_table_is_an_error_with_a_remedy(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    measured.save(table(record(FAST)), path)
    fields = json.loads(path.read_text())
    damage(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"got {path}: .*; remove the file, or measure again"):
        measured.load(path)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"format": 1', "\x00"])
def test_no_text_is_a_crash(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match="a table of times requires what this version writes"):
        measured.load(tmp_path / "t.json")


def test_a_broken_file_is_set_aside_when_saving(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text("{")
    measured.save(table(record(FAST)), path)
    assert measured.load(path) == table(record(FAST))
    assert (tmp_path / "h200.json.broken").read_text() == "{"


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h200.json"
    measured.save(table(record(FAST)), path)

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured.save(table(record(SLOW)), path)
    assert measured.load(path) == table(record(FAST))
    assert [file.name for file in tmp_path.iterdir()] == ["h200.json"]


def test_the_file_is_whole_whoever_saves(tmp_path: Path) -> None:
    """Writers may overwrite each other's additions; a reader never sees half a file."""
    path, stop = tmp_path / "h200.json", threading.Event()
    measured.save(table(record(FAST)), path)

    def write(first: int) -> None:
        for i in itertools.count(first, 2):
            measured.save(table(record(SLOW, problem=Problem(i % 20 + 1, 2, 3))), path)
            if stop.is_set():
                return

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            assert measured.key(PROBLEM) in measured.load(path).records
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_users_record_comes_before_the_shipped_one(user_dir: Path) -> None:
    only_shipped = Problem(1, 2, 3)
    assert list(measured.found("h200", PROBLEM)) == []
    measured.save(table(record(SLOW), record(SLOW, problem=only_shipped)), measured.shipped_path("h200"))
    assert list(measured.found("h200", PROBLEM)) == [record(SLOW)]
    measured.save(table(record(FAST)), measured.user_path("h200"))  # seen at once: the file has changed
    assert measured.user_path("h200").parent == user_dir
    assert list(measured.found("h200", PROBLEM)) == [record(FAST), record(SLOW)]
    assert list(measured.found("h200", only_shipped)) == [record(SLOW, problem=only_shipped)]
    assert list(measured.found("h100", PROBLEM)) == []


def test_a_broken_user_table_is_one_warning(user_dir: Path) -> None:
    user_dir.mkdir()
    path = measured.user_path("h200")
    path.write_text("{")
    measured.save(table(record(SLOW)), measured.shipped_path("h200"))
    with pytest.warns(
        UserWarning, match=rf"measured times of {path} are not used: .* got {path}: .*remove the file"
    ) as seen:
        for _ in range(3):
            assert list(measured.found("h200", PROBLEM)) == [record(SLOW)]
    assert len(seen) == 1
    measured.save(table(record(FAST)), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(measured.found("h200", PROBLEM)) == [record(FAST), record(SLOW)]


def test_a_table_of_another_arch_is_a_warning(user_dir: Path) -> None:
    measured.save(table(record(FAST), arch="b200"), measured.user_path("h200"))
    with pytest.warns(UserWarning, match="requires times of h200, got b200"):
        assert list(measured.found("h200", PROBLEM)) == []


def test_without_a_setting_the_table_is_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAX_BWGEMM_TABLES")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measured.user_path("h200") == tmp_path / ".cache/jax_bwgemm/tables/h200.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert measured.user_path("h200") == tmp_path / "xdg/jax_bwgemm/tables/h200.json"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who named no directory of tables; a table has shipped."""
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped")
    measured.save(table(record(SLOW)), measured.shipped_path("h200"))
    monkeypatch.delenv("JAX_BWGEMM_TABLES")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    measured._user_path.cache_clear()
    return tmp_path / "home"


def test_without_a_home_there_is_no_user_table(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none in a directory `~` of the working directory."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    measured.save(table(record(FAST)), tmp_path / "~/.cache/jax_bwgemm/tables/h200.json")
    assert list(measured.found("h200", PROBLEM)) == [record(SLOW)]
    assert len(measured.state("h200")) == 1
    with pytest.raises(ValueError, match="a table of times requires a directory, got no home: set JAX_BWGEMM_TABLES"):
        measured.user_path("h200")


def test_the_users_table_is_the_users_alone(home: Path) -> None:
    measured.save(table(record(FAST)), measured.user_path("h200"))
    directories = (home / ".cache/jax_bwgemm", home / ".cache/jax_bwgemm/tables")
    assert [stat.S_IMODE(directory.stat().st_mode) for directory in directories] == [0o700] * 2
    assert list(measured.found("h200", PROBLEM)) == [record(FAST), record(SLOW)]
    directories[1].chmod(0o777)
    measured._records.cache_clear()
    with pytest.warns(UserWarning, match="are not used: .*/tables requires a directory of user .* 777"):
        assert list(measured.found("h200", PROBLEM)) == [record(SLOW)]
    with pytest.raises(ValueError, match="/tables requires a directory of user"):
        measured.save(table(record(FAST)), measured.user_path("h200"))


def test_a_table_that_nobody_may_read_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.save(table(record(FAST)), measured.user_path("h200"))
    with forbidden(home), pytest.warns(UserWarning, match="are not used: .* Permission denied"):
        measured.state("h200")
        next(iter(measured.found("h200", PROBLEM)), None)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000])
def test_a_table_in_depth_is_a_warning(text: str, user_dir: Path) -> None:
    user_dir.mkdir()
    measured.user_path("h200").write_text(text)
    with pytest.warns(UserWarning, match="requires JSON, got maximum recursion depth exceeded"):
        assert list(measured.found("h200", PROBLEM)) == []


def test_a_table_that_never_ends_is_a_warning(user_dir: Path) -> None:
    user_dir.mkdir()
    measured.user_path("h200").symlink_to("/dev/zero")
    with pytest.warns(UserWarning, match="it is no regular file"):
        assert list(measured.found("h200", PROBLEM)) == []
    os.mkfifo(measured.user_path("b200"))
    with pytest.warns(UserWarning, match="it is no regular file"):
        assert list(measured.found("b200", PROBLEM)) == []


@fuzz
def test_no_damage_of_a_table_is_a_crash(tmp_path: Path) -> None:
    path, rng, refused = tmp_path / "t.json", random.Random(SEED), 0
    measured.save(table(record(FAST, SWAPPED), record(SLOW, problem=Problem(1, 2, 3))), path)
    content = path.read_bytes()
    for _ in range(rounds(1500)):
        path.write_bytes(mutant(content, rng))
        try:
            found = measured.load(path)
        except ValueError as error:
            refused += 1
            assert "remove the file, or measure again" in str(error)
            continue
        assert all(0 < time.us < math.inf for record in found.records.values() for time in record.times)
    assert refused > rounds(750)


def test_shipped_tables_can_be_used() -> None:
    for path in measured.SHIPPED.glob("*.json"):
        shipped = measured.load(path)
        assert shipped.arch == path.stem and shipped.arch in ARCHS
        for found in shipped.records.values():
            assert [time.us for time in found.times] == sorted(time.us for time in found.times)
            assert all(str(Tile.from_str(time.tile)) == time.tile for time in found.times)
