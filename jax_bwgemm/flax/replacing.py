"""`replace`: the dense layers of a model that exists already become ours, and theirs again."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from jax_bwgemm.flax import bodies
from jax_bwgemm.flax import nnx as our_nnx
from jax_bwgemm.flax.product import finished

_OURS = {nnx.Linear: our_nnx.Linear, nnx.LinearGeneral: our_nnx.LinearGeneral, nnx.Einsum: our_nnx.Einsum}


@dataclasses.dataclass(frozen=True)
class Replaced:
    """What `replace` made.

    Attributes:
      model: the model to use from now on.
      replaced: the layers whose products are ours now, by path.
      kept: the layers with parameters that are as before, by path, and why. Both are filled by linen's calls.
    """

    model: Any
    replaced: dict[str, str]
    kept: dict[str, str]
    _undo: Callable[[], Any] = dataclasses.field(repr=False)

    def undo(self) -> Any:
        """The model as it was: of nnx the same object, changed back; of linen the original. A second call does
        nothing."""
        return self._undo()

    def __str__(self) -> str:
        lines = [f"{path}: {name}" for path, name in self.replaced.items()]
        lines += [f"{path}: kept, {reason}" for path, reason in self.kept.items()]
        return "\n".join(lines) or "no layers with parameters"


def replace(model: Any) -> Replaced:
    """Has the dense layers of a Flax model add their bias in the product's kernel, with no edit of the model.

    Those are `nnx.Linear`, `LinearGeneral` and `Einsum`, and linen's `Dense`, `DenseGeneral` and `Einsum`, wherever
    they are: in attention, too. Subclasses and layers with a `dot_general` of their own are kept. Parameters are the
    same, and so are checkpoints. An activation behind a layer stays where it is.

    An nnx model is changed in place: its layers change their class, so that who refers to them, or to their
    parameters, still does: do it outside of `nnx.jit`. A linen module is copied: `apply` and `init` of the copy, and
    its public methods, swap the layers that they call, whoever creates them. A layer that is taken out of a bound copy
    and called by itself is as it was.

    Args:
      model: an `nnx.Module` or an unbound `flax.linen.Module`.

    Returns:
      A `Replaced`, with the `model` to use, a report, and `undo`.

    Raises:
      TypeError: `model` is no Flax module.
      ValueError: it is a linen module that is bound.

    Example:
      >>> swapped = jax_bwgemm.flax.replace(model)
      >>> print(swapped)
      >>> model = swapped.undo()
    """
    if isinstance(model, nnx.Module):
        return _replace_nnx(model)
    if isinstance(model, nn.Module):
        return _replace_linen(model)
    raise TypeError(f"`model` requires an `nnx.Module` or a `flax.linen.Module`, got {type(model).__name__}")


def _replace_nnx(model: nnx.Module) -> Replaced:
    changed: list[nnx.Module] = []

    def undo() -> nnx.Module:
        while changed:
            module = changed.pop()
            _set_class(module, type(module).__base__)
        return model

    result = Replaced(model, {}, {}, undo)
    for parts, module in list(nnx.iter_modules(model)):
        path, kind = ".".join(map(str, parts)), type(module)
        has_parameters = any(isinstance(value, nnx.Param) for value in vars(module).values())
        if not has_parameters and kind is not nnx.bridge.ToNNX:
            continue
        reason = _why_not(bodies.NNX, module)
        if reason is None:
            _set_class(module, _OURS[kind])
            changed.append(module)
        _note(result, path, module, reason)
    return result


def _kind(module: Any) -> type:
    """Its class, as the user wrote it."""
    kind = type(module)
    while issubclass(kind, _Copy):
        kind = kind.__bases__[0]
    return kind


def _why_not(kinds: tuple[type, ...], module: Any) -> str | None:
    kind = _kind(module)
    if kind in kinds:
        return bodies.why_not(kind, module)
    if kind in _OURS.values():
        return "it is ours already"
    if kind is nnx.bridge.ToNNX:
        return "it holds a linen module: replace that one before"
    base = next((base for base in kinds if isinstance(module, base)), None)
    return f"{kind.__name__} is a subclass of {base.__name__}" if base else f"{kind.__name__} is no dense layer"


def _note(result: Replaced, path: str, module: Any, reason: str | None) -> None:
    if reason is None:
        result.replaced[path] = _kind(module).__name__
    else:
        result.kept[path] = reason


def _set_class(module: Any, kind: Any) -> None:
    """Past Flax, which would take the class for an attribute of the module."""
    object.__setattr__(module, "__class__", kind)


class _Copy:
    """A linen module whose methods swap what they call, also under pickle."""

    def __reduce__(self) -> Any:
        return _copied, (_plain(self),)


_ENTRIES = ("apply", "init_with_output")  # through which linen calls any method, or a function of the module


def _replace_linen(model: nn.Module) -> Replaced:
    if model.scope is not None:
        raise ValueError("`model` requires an unbound module, got a bound one: replace it before `bind`, from outside")
    result = Replaced(_plain(model), {}, {}, lambda: model)
    intercept, kind = functools.partial(_swapped, result), _kind(model)
    names = [*_ENTRIES, *(name for name in dir(kind) if _is_called(kind, name))]
    methods = {name: _intercepted(getattr(kind, name), intercept) for name in names}
    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = type(kind.__name__, (kind, _Copy), methods | about)  # linen names submodules after the class
    _set_class(result.model, own)
    return result


def _plain(model: Any) -> Any:
    """A copy of the user's class, be `model` one of ours."""
    plain = model.clone()
    _set_class(plain, _kind(model))
    return plain


def _copied(model: nn.Module) -> Any:
    return _replace_linen(model).model


def _is_called(kind: type, name: str) -> bool:
    """Whether other modules, or who binds it, call it, and it may call layers."""
    is_own = name == "__call__" or not (name.startswith("_") or hasattr(nn.Module, name))
    method = inspect.getattr_static(kind, name)
    return is_own and inspect.isfunction(method) and not hasattr(method, "nowrap")


def _intercepted(method: Callable[..., Any], intercept: Callable[..., Any]) -> Callable[..., Any]:
    @nn.nowrap
    @functools.wraps(method, updated=())
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with nn.intercept_methods(intercept):
            return method(self, *args, **kwargs)

    return call


def _swapped(
    result: Replaced, following: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], context: Any
) -> Any:
    """What a method of a module returns, in a call of the copy."""
    module = context.module
    kind = _kind(module)
    if context.method_name != "__call__" or kind.__module__.startswith(f"{__package__}."):
        return following(*args, **kwargs)
    path, reason = "/".join(module.path), _why_not(bodies.LINEN, module)
    if reason is None:
        _note(result, path, module, None)
        return finished(bodies.product_of(kind, module, *args, **kwargs))
    out = following(*args, **kwargs)
    if any(not isinstance(value, Mapping) for value in module.variables.get("params", {}).values()):
        _note(result, path, module, reason)
    return out
