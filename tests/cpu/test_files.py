"""Files: nothing that a disk holds is a crash or a hang, and nobody else's file is touched."""

from __future__ import annotations

import contextlib
import gzip
import os
import pwd
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from privileges import NOBODY, forbidden

from jax_bwgemm import _files
from jax_bwgemm._files import FileError

ROOT = Path(__file__).parents[2]
MOST = 1000
BOMB = gzip.compress(bytes(2**27))  # 130 kB


def compressed(content: bytes = b"text" * 100) -> bytes:
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize("read", [_files.read_bytes, _files.read_json, _files.read_gzip, _files.sha256])
def test_what_is_no_readable_file_is_a_sentence(read, tmp_path):
    """A FIFO that nobody writes would wait for ever, /dev/zero would never end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_bytes(bytes(MOST + 1))
    for path, why in (
        (tmp_path / "none", "No such file or directory"),
        (tmp_path / "fifo", "it is no regular file"),
        (Path("/dev/zero"), "it is no regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "large" / "file", "Not a directory"),
        (tmp_path / "large", f"requires at most {MOST} bytes, got more"),
    ):
        with pytest.raises(FileError, match=f"{path} .*{re.escape(why)}"):
            read(path, MOST)
    path = tmp_path / "closed" / "file"
    with forbidden(tmp_path / "closed"), pytest.raises(FileError, match=f"{path} cannot be read: Permission denied"):
        read(path, MOST)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 900, b'"' + b"\x80" + b'"', b"1" * 900 + b"e"])
def test_json_that_is_none(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with contextlib.suppress(FileError):  # what Python's parser takes is for whoever asked
        _files.read_json(tmp_path / "file", MOST)


def test_deep_json(tmp_path):
    (tmp_path / "file").write_text("[" * 200_000)
    with pytest.raises(FileError, match="requires JSON, got maximum recursion depth"):
        _files.read_json(tmp_path / "file", 2**20)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "requires gzip to its end, got less"),
        (compressed()[:-1], "requires gzip to its end, got less"),
        (compressed()[:12], "requires gzip to its end, got less"),
        (compressed() + b"more", "requires gzip to its end, got more"),
        (b"text", "requires gzip, got Error -3"),
        (compressed()[:-8] + bytes(8), "requires gzip, got Error -3"),  # another checksum
        (compressed()[:12] + b"\xff" + compressed()[13:], "requires gzip, got Error -3"),
        (compressed(bytes(MOST + 1)), "requires at most 1000 bytes inside, got more"),
    ],
)
def test_gzip_that_is_none(content, why, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(FileError, match=re.escape(f"{tmp_path}/file {why}")):
        _files.read_gzip(tmp_path / "file", MOST)
    (tmp_path / "file").write_bytes(compressed(bytes(MOST)))
    assert _files.read_gzip(tmp_path / "file", MOST) == bytes(MOST)


def test_gzip_is_inflated_no_further_than_it_may(tmp_path):
    (tmp_path / "file").write_bytes(BOMB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match="inside, got more"):
        _files.read_gzip(tmp_path / "file", 2**20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB: half of what it holds


def test_a_file_is_hashed_once_for_each_state(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    first = _files.sha256(path, MOST)
    assert first.startswith("ba7816bf")
    monkeypatch.setattr(_files, "read_bytes", lambda *_: pytest.fail("read again"))
    assert _files.sha256(path, MOST) == first
    monkeypatch.undo()
    path.write_bytes(b"abd")
    os.utime(path, ns=(1, 1))
    assert _files.sha256(path, MOST) != first


@contextlib.contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """As near as it gets: no file may grow beyond `most_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    _files.write_atomically(path, b"old")
    with full_disk(10), pytest.raises(OSError, match="File too large"):
        _files.write_atomically(path, b"new" * 100)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"
    _files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_writing_follows_no_link_and_takes_over_what_a_dead_process_left(tmp_path):
    (tmp_path / "victim").write_text("theirs")
    scratch = tmp_path / f"file.{os.getpid()}.{threading.get_ident()}"
    scratch.symlink_to(tmp_path / "victim")
    _files.write_atomically(tmp_path / "file", b"mine")
    assert (tmp_path / "victim").read_text() == "theirs" and (tmp_path / "file").read_bytes() == b"mine"
    assert not scratch.is_symlink()


def test_scratch_names():
    own = {"sm_90a_x.cubin", "sm_90a_x.ptx.gz"}
    assert all(_files.is_scratch_of(name, own) for name in ("sm_90a_x.cubin.12", "sm_90a_x.ptx.gz.12.345"))
    others = ("sm_90a_x.cubin", "sm_90a_x.cubin.bak", "sm_90a_y.cubin.12", "sm_90a_x.cubin.12.34.56", "12", "")
    assert not any(_files.is_scratch_of(name, own) for name in others)


def test_a_lock_neither_empties_nor_follows(tmp_path):
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("link", "dangling"):
        with pytest.raises(OSError, match="Too many levels of symbolic links"), _files.locked(tmp_path / name):
            pass
    assert (tmp_path / "victim").read_text() == "theirs" and not (tmp_path / "new").exists()
    with _files.locked(tmp_path / "victim"):
        assert (tmp_path / "victim").read_text() == "theirs"


def test_a_lock_is_waited_for_and_ends_with_its_process(tmp_path):
    path = tmp_path / ".lock"
    code = f"from pathlib import Path; from jax_bwgemm import _files\nwith _files.locked(Path({str(path)!r})):\n"
    holder = [sys.executable, "-c", code + "    print('held', flush=True); import time; time.sleep(60)"]
    with subprocess.Popen(holder, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with _files.locked(path, on_wait=lambda: process.send_signal(signal.SIGKILL)):
            assert process.wait() == -signal.SIGKILL


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def homeless(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No HOME, and a user whom /etc/passwd does not know: the working directory."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    return home


def test_where_the_cache_is(home, monkeypatch):
    assert _files.cache_path("x", "y") == home / ".cache" / "jax_bwgemm" / "x" / "y"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG base directory specification
    assert _files.cache_path() == home / ".cache" / "jax_bwgemm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert _files.cache_path("x") == home / "xdg" / "jax_bwgemm" / "x"


def test_no_home_no_cache(homeless):
    with pytest.raises(FileError, match="a cache requires a home directory, got none: set XDG_CACHE_HOME"):
        _files.cache_path("x")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_cache_is_made_for_the_user_alone(home):
    (home / ".cache" / "jax_bwgemm").mkdir(parents=True)
    (home / ".cache" / "jax_bwgemm").chmod(0o755)  # as earlier versions made it
    _files.make_own(_files.cache_path("x", "y"))
    assert [mode(_files.cache_path(*parts)) for parts in ((), ("x",), ("x", "y"))] == [0o700] * 3
    _files.check_own(_files.cache_path("x", "y"))


@pytest.mark.parametrize("parts", [(), ("x",)])
def test_a_cache_that_others_can_write_to_is_not_used(parts, home):
    for check in (_files.make_own, _files.check_own):
        for bad in (0o777, 0o770, 0o1777):
            _files.cache_path("x").mkdir(parents=True, exist_ok=True)
            _files.cache_path(*parts).chmod(bad)
            with pytest.raises(
                FileError, match=f"requires a directory of user .* with mode {bad:o}: remove it, or set"
            ):
                check(_files.cache_path("x"))
            assert mode(_files.cache_path(*parts)) == bad
        _files.cache_path(*parts).chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own files as another user")
def test_a_cache_of_another_user_is_not_used(home):
    theirs = home / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, -1)
    (home / ".cache").mkdir()
    root = _files.cache_path()
    root.symlink_to(theirs)
    for make in (_files.make_own, _files.check_own):
        with pytest.raises(FileError, match=f"{root} requires a directory of user 0 .*, got one of user {NOBODY}"):
            make(root)
    root.unlink()
    own = home / "own"
    own.mkdir(mode=0o700)
    root.symlink_to(own)
    _files.make_own(root)  # one's own link to one's own directory
    os.chown(root, NOBODY, -1, follow_symlinks=False)
    with pytest.raises(FileError, match="requires a directory of user 0"):
        _files.make_own(root)


def test_a_cache_that_cannot_be_made_is_a_sentence(home):
    (home / ".cache").write_text("a file")
    with pytest.raises(FileError, match="cannot be made: (File exists|Not a directory)"):
        _files.make_own(_files.cache_path("x"))
    (home / ".cache").unlink()
    with forbidden(home), pytest.raises(FileError, match="cannot be made: Permission denied"):
        _files.make_own(_files.cache_path("x"))
