"""Defaults, where they come from, and what bad values are told."""

from __future__ import annotations

import warnings

import pytest

import jax_bwgemm
from jax_bwgemm.runtime.config import Config, current, report_fallback, resolve


@pytest.fixture(autouse=True)
def _own_default(monkeypatch):
    monkeypatch.delenv("JAX_BWGEMM_COMPILE_MISSING")


def test_defaults():
    assert current() == Config("warn", None, "off", "auto")


def test_environment(monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "error")
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "b200")
    monkeypatch.setenv("JAX_BWGEMM_EMULATE", "sm_100f")
    monkeypatch.setenv("JAX_BWGEMM_COMPILE_MISSING", "never")
    assert current() == Config("error", "b200", "sm_100f", "never")
    with jax_bwgemm.config(compile_missing="auto"):
        assert current() == Config("error", "b200", "sm_100f", "auto")


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


@pytest.mark.parametrize("target, device", [("sm_90a", "h200"), ("sm_100f", "b200"), ("sm_100a", "b200")])
def test_emulated_target_is_planned_as_one_device(target, device):
    with jax_bwgemm.config(emulate=target) as settings:
        assert settings == Config(emulate=target) and settings.planned_device == device
        assert not resolve(None, None, "off").is_emulated
    assert resolve(None, "h100", "sm_90a").planned_device == "h100"
    assert Config().planned_device is None


def test_argument_wins():
    with jax_bwgemm.config(on_fallback="ignore", device="h200"):
        assert resolve("error", "b300") == Config("error", "b300")


def test_bad_values():
    with pytest.raises(ValueError, match=r"`on_fallback` requires one of warn, ignore, error, got 'loud'"):
        resolve("loud", None)
    with pytest.raises(ValueError, match=r"`device` requires one of h100, h200, b200, b300, got 'a100'"):
        resolve(None, "a100")
    with pytest.raises(ValueError, match=r"`emulate` requires one of off, sm_90a, sm_100f, sm_100a, got 'sm_80'"):
        resolve(None, None, "sm_80")
    with pytest.raises(ValueError, match=r"sm_100a, got 'sm_103a': pass 'sm_100f' and `device` 'b300'$"):
        resolve(None, None, "sm_103a")
    with pytest.raises(ValueError, match=r"`emulate` 'sm_90a' requires the `device` h100, h200, got 'b200'"):
        resolve(None, "b200", "sm_90a")
    with pytest.raises(ValueError, match=r"`compile_missing` requires one of auto, never, got 'always'"):
        resolve(None, None, None, "always")


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("ON_FALLBACK", "loud", "`on_fallback` requires one of warn, ignore, error, got 'loud'"),
        ("DEVICE", "a100", "`device` requires one of .*, got 'a100'"),
        ("EMULATE", "sm_80", "`emulate` requires one of .*, got 'sm_80'"),
        ("COMPILE_MISSING", "always", "`compile_missing` requires one of auto, never, got 'always'"),
        ("PARTIAL_SUMS", "bf16", "`partial_sums` requires one of .*, got 'bf16'"),
        ("DETERMINISTIC", "yes", "`deterministic` requires one of run, batch, got 'yes'"),
    ],
)
def test_bad_environment_is_named(name, value, sentence, monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "ignore")
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "h200")
    monkeypatch.setenv(f"JAX_BWGEMM_{name}", value)
    with pytest.raises(ValueError, match=f"{sentence}, from JAX_BWGEMM_{name}$"):
        current()


def test_variables_that_do_not_agree_are_named(monkeypatch):
    monkeypatch.setenv("JAX_BWGEMM_ON_FALLBACK", "ignore")
    monkeypatch.setenv("JAX_BWGEMM_DEVICE", "b200")
    monkeypatch.setenv("JAX_BWGEMM_EMULATE", "sm_90a")
    with pytest.raises(ValueError, match="got 'b200', from JAX_BWGEMM_EMULATE and JAX_BWGEMM_DEVICE$"):
        current()


def test_warns_once_per_product_and_reason():
    with pytest.warns(jax_bwgemm.FallbackWarning, match="XLA computes") as caught:
        for what, reason in (("p", "r"), ("p", "r"), ("q", "r"), ("p", "s")):
            report_fallback("warn", what, reason)
    assert len(caught) == 3


def test_a_warning_that_is_an_error_is_one_each_time():
    with warnings.catch_warnings():
        warnings.simplefilter("error", jax_bwgemm.FallbackWarning)
        for _ in range(2):
            with pytest.raises(jax_bwgemm.FallbackWarning, match="XLA computes raised: r"):
                report_fallback("warn", "raised", "r")


def test_ignore_and_error():
    report_fallback("ignore", "p", "r")
    with pytest.raises(jax_bwgemm.FallbackError, match="XLA computes p: r"):
        report_fallback("error", "p", "r")
