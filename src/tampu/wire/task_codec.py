"""Encode and decode a task's arguments and results as MessagePack. Both directions check the types.

A parameter is encoded by its annotation if msgspec supports it (datetime, UUID, Decimal, Enum, dataclass, list[...]).
Without an annotation, or with an unsupported one, the value must be a plain MessagePack value.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Union, get_type_hints

import msgspec

from tampu.errors import ConfigError, DecodeError, EncodeError
from tampu.wire.limits import check_key
from tampu.wire.payload import decode_slot, decode_value, encode_value, refuse_array_keys
from tampu.wire.typed import TypedPayload, is_pydantic

if TYPE_CHECKING:
    from collections.abc import Callable, Container

_UNSET = msgspec.UNSET


class Arguments:
    """Encodes a function's arguments as one payload, a dict by parameter name."""

    def __init__(self, function: Callable[..., Any], name: str, provided: Container[str] = ()) -> None:
        self._name = name
        #: The parameters that a worker provides: they are not part of the payload.
        self._provided = provided
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise ConfigError(f"task {name!r}: cannot read the signature of {function!r}; wrap it in a def") from None
        kept = [parameter for parameter in self._signature.parameters.values() if parameter.name not in provided]
        self._signature = self._signature.replace(parameters=kept)
        hints = hints_of(function)
        fields: list[Any] = []
        self._untyped: list[str] = []
        #: The name of `**kwargs`, if there is one.
        self._rest: str | None = None
        for parameter in self._signature.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"task {name!r}: parameter {parameter.name!r} is positional-only or *args, but arguments are sent "
                    "by name; use parameters that can be passed by keyword"
                )
            if parameter.kind is parameter.VAR_KEYWORD:
                self._rest = parameter.name
                continue
            hint = _known_hint(hints.get(parameter.name, Any))
            if hint is Any:
                hint = msgspec.Raw  # encoded and decoded as a value without a type
                self._untyped.append(parameter.name)
            fields.append(_field(parameter, hint))
        self._all_names = {field[0] for field in fields}
        self._has_optional = any(len(field) > 2 for field in fields)
        self._codec = TypedPayload(msgspec.defstruct(f"call of {name}", fields, kw_only=True))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, with defaults. Raises `TypeError` for a wrong signature."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"task {self._name!r}: {error}; nothing was sent") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Encode the arguments of a call. Raises `TypeError` for a wrong signature, `EncodeError` for a wrong type."""
        if not args and self._rest is None and kwargs.keys() == self._all_names:
            values = kwargs.copy()  # every argument is given by name, the usual call: saves the 5 us that `bind` takes
        else:
            values = self.bind(args, kwargs)
        rest = values.pop(self._rest, {}) if self._rest is not None else {}
        for name in rest:
            if name in self._provided:
                raise TypeError(f"task {self._name!r}: {name!r} is provided by the worker; nothing was sent")
        for name in (*self._untyped, *rest):
            # Without a type there is no way to restore anything but a plain value.
            try:
                if name in rest:
                    encode_value(rest[name])
                else:
                    values[name] = msgspec.Raw(encode_value(values[name]))
            except EncodeError as error:
                raise EncodeError(f"task {self._name!r}, argument {name!r}: {error}; nothing was sent") from error
        try:
            packed = self._codec.encode(self._codec.payload_type(**values))
        except EncodeError as error:
            raise EncodeError(f"task {self._name!r}: {error.__cause__}; nothing was sent") from error
        return encode_value(decode_slot(packed) | rest) if rest else packed

    def decode(self, slot: bytes) -> dict[str, Any]:
        """Decode a payload to keyword arguments. Raises `DecodeError` if they do not fit the function.

        Parameters with a default may be missing and unknown arguments are ignored, so waiting jobs survive a change of
        the signature.
        """
        call = self._codec.decode_slot(slot)
        found = msgspec.structs.asdict(call)
        if self._has_optional:
            found = {name: value for name, value in found.items() if value is not _UNSET}
        for name in self._untyped:
            if name in found:
                found[name] = decode_value(found[name])
        if self._rest is not None:
            found |= {name: value for name, value in decode_slot(slot).items() if name not in found}
        return found


class KeyedPayload(bytes):
    """An encoded call, and the key by which limits count its job."""

    key: str


class KeyedArguments(Arguments):
    """Encodes the arguments of a task with keys. `key_of` names those of the task's parameters that it needs."""

    def __init__(
        self, function: Callable[..., Any], name: str, key_of: Callable[..., str], provided: Container[str] = ()
    ) -> None:
        super().__init__(function, name, provided)
        self._key_of = key_of
        try:
            needed = inspect.signature(key_of).parameters
        except (TypeError, ValueError):
            raise ConfigError(f"task {name!r}: cannot read the signature of key={key_of!r}; wrap it in a def") from None
        if unknown := needed.keys() - self._signature.parameters.keys():
            raise ConfigError(
                f"task {name!r}: its key function takes {', '.join(sorted(unknown))}, but the task's parameters are "
                f"{', '.join(self._signature.parameters)}"
            )
        self._needed = list(needed)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeyedPayload:
        """Encode the arguments of a call, with its key. Raises `ConfigError` if there is none."""
        packed = KeyedPayload(super().encode(args, kwargs))
        values = self.bind(args, kwargs)
        try:
            key = self._key_of(**{name: values[name] for name in self._needed})
        except Exception as error:
            raise ConfigError(
                f"task {self._name!r}: its key function raised {type(error).__name__}: {error}; nothing was sent"
            ) from error
        packed.key = check_key(key, f"the key of task {self._name!r}")
        return packed


class Results:
    """Encodes a function's return value: plain values as they are, others by the return annotation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hint = _known_hint(hints_of(function).get("return", Any))
        self._codec = None if hint is Any else TypedPayload(hint)

    def encode(self, value: Any) -> bytes:
        """Encode a return value. Raises `EncodeError` if it would not decode to an equal value."""
        try:
            return encode_value(value)
        except EncodeError:
            if self._codec is None:
                raise
            packed = self._codec.encode(value)
        try:
            refuse_array_keys(packed)  # callers decode results without a type
        except DecodeError as error:
            raise EncodeError(f"the result has no faithful MessagePack form: {error}") from None
        return packed

    def convert(self, value: Any) -> Any:
        """Convert a stored value to the annotated type; return it unchanged if it does not fit."""
        if self._codec is None or value is None:
            return value
        try:
            return self._codec.convert(value)
        except DecodeError:
            return value


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations that can be resolved; one that exists only for type checkers does not hide the others."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:
        found: dict[str, Any] = {}
        function = inspect.unwrap(function)
        for name, annotation in getattr(function, "__annotations__", {}).items():

            def alone() -> None: ...

            alone.__annotations__ = {name: annotation}
            with contextlib.suppress(Exception):
                found |= get_type_hints(alone, getattr(function, "__globals__", {}), include_extras=True)
        return found


def _known_hint(hint: Any) -> Any:
    """Return the annotation, or Any if it does not determine how a value is encoded."""
    try:
        kind = msgspec.inspect.type_info(hint)
        msgspec.msgpack.Decoder(hint)
    except Exception:
        return Any
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return hint if all(map(_says_how, kinds)) else Any


def _says_how(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.CustomType):
        return is_pydantic(kind.cls)
    return not isinstance(kind, msgspec.inspect.AnyType)


def _field(parameter: inspect.Parameter, hint: Any) -> tuple[Any, ...]:
    if parameter.default is parameter.empty:
        return parameter.name, hint
    if hint is msgspec.Raw:
        return parameter.name, hint, _UNSET  # msgspec ignores Raw in a union
    if parameter.default is None:
        hint = Union[hint, None]  # noqa: UP007 - `x: int = None` is common and means `int | None`
    return parameter.name, Union[hint, msgspec.UnsetType], _UNSET  # noqa: UP007 - a hint may be a str or Annotated
