"""Defaults, where they come from, and what bad values are told."""

from __future__ import annotations

import pytest

import jax_bwgemm
from jax_bwgemm.config import Config, current, report_fallback, resolve


def test_defaults():
    assert current() == Config("warn", None)


def test_environment(monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "error")
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "b200")
    assert current() == Config("error", "b200")


def test_block_overrides_environment_and_nests(monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "b200")
    with jax_bwgemm.config(on_fallback="ignore"):
        assert current() == Config("ignore", "b200")
        with jax_bwgemm.config(device="h100") as inner:
            assert inner == current() == Config("ignore", "h100")
        assert current() == Config("ignore", "b200")
    assert current() == Config("warn", "b200")


def test_block_ends_with_an_exception():
    with pytest.raises(KeyError), jax_bwgemm.config(on_fallback="ignore"):
        raise KeyError
    assert current() == Config()


def test_argument_wins():
    with jax_bwgemm.config(on_fallback="ignore", device="h200"):
        assert resolve("error", "b300") == Config("error", "b300")


def test_bad_values():
    with pytest.raises(ValueError, match=r"`on_fallback` requires one of warn, ignore, error, got 'loud'"):
        resolve("loud", None)
    with pytest.raises(ValueError, match=r"`device` requires one of h100, h200, b200, b300, got 'a100'"):
        resolve(None, "a100")


def test_bad_environment_is_named(monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "loud")
    with pytest.raises(ValueError, match="got 'loud', from JAX_BWGEMM_ON_FALLBACK or JAX_BWGEMM_DEVICE"):
        current()


def test_warns_once_per_product_and_reason():
    with pytest.warns(jax_bwgemm.FallbackWarning, match="XLA computes") as caught:
        for what, reason in (("p", "r"), ("p", "r"), ("q", "r"), ("p", "s")):
            report_fallback("warn", what, reason)
    assert len(caught) == 3


def test_ignore_and_error():
    report_fallback("ignore", "p", "r")
    with pytest.raises(jax_bwgemm.FallbackError, match="XLA computes p: r"):
        report_fallback("error", "p", "r")
