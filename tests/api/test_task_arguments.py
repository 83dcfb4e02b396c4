"""Which arguments a task can have, and how they are decoded. Needs no server."""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, Optional

import msgspec
import pytest

from tampu import ConfigError, DecodeError, EncodeError, Queue
from tampu.wire.payload import decode_value, encode_value
from tampu.wire.task_codec import Arguments, Results

if TYPE_CHECKING:
    from nowhere import OnlyForTypeCheckers


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    LARGE = 3


@dataclasses.dataclass
class Invoice:
    number: int
    total: Decimal
    lines: list[str] = dataclasses.field(default_factory=list)


class Point(msgspec.Struct):
    x: float
    y: float


class Address(typing.TypedDict):
    city: str


class Unknown:
    """A type that MessagePack cannot encode."""


def taking(**annotations: Any) -> Callable[..., Any]:
    """Return a function with these parameters and annotations."""
    source = f"def task({', '.join(name for name in annotations if name != 'return')}): ..."
    made: dict[str, Any] = {}
    exec(source, made)
    made["task"].__annotations__ = annotations
    function: Callable[..., Any] = made["task"]
    return function


def sent(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments as a worker decodes them."""
    arguments = Arguments(function, "t")
    return arguments.decode(arguments.encode(args, kwargs))


def on_the_wire(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the payload as other clients decode it."""
    return decode_value(Arguments(function, "t").encode(args, kwargs))


WHEN = datetime(2026, 3, 1, 12, 30, 15, 250000, tzinfo=UTC)
TYPED_VALUES: list[tuple[Any, Any]] = [
    (str, "é"),
    (int, -(2**63)),
    (float, 1.5),
    (bool, True),
    (bytes, b"\x00\xff"),
    (type(None), None),
    (datetime, WHEN),
    (datetime, datetime(2026, 3, 1, 12, 30)),
    (date, date(2026, 3, 1)),
    (timedelta, timedelta(seconds=90)),
    (uuid.UUID, uuid.UUID(int=7)),
    (Decimal, Decimal("12.50")),
    (Colour, Colour.RED),
    (Size, Size.LARGE),
    (Invoice, Invoice(1, Decimal("9.99"), ["a"])),
    (Point, Point(1.0, 2.0)),
    (Address, {"city": "Cusco"}),
    (Optional[int], None),  # noqa: UP045 - as people write it
    (int | None, 4),
    (list[Invoice], [Invoice(1, Decimal(1))]),
    (Sequence[int], [1, 2]),
    (Mapping[str, uuid.UUID], {"a": uuid.UUID(int=1)}),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (tuple[int, str], (1, "a")),
    (Literal["a", "b"], "a"),
    (Any, {"a": [1, None]}),
]


@pytest.mark.parametrize(("annotation", "value"), TYPED_VALUES, ids=lambda part: str(part)[:30])
def test_a_value_is_decoded_as_its_annotation(annotation: Any, value: Any) -> None:
    came = sent(taking(x=annotation), value)["x"]
    assert came == value
    assert type(came) is type(value)


def test_the_payload_is_the_arguments_by_name_including_defaults() -> None:
    def task(to: str, subject: str = "hi", *, urgent: bool = False) -> None: ...

    assert on_the_wire(task, "ada") == {"to": "ada", "subject": "hi", "urgent": False}
    assert on_the_wire(task, "ada", "yo", urgent=True) == {"to": "ada", "subject": "yo", "urgent": True}
    assert on_the_wire(task, subject="yo", to="ada") == {"to": "ada", "subject": "yo", "urgent": False}


def test_string_annotations_are_resolved() -> None:
    def task(id: "uuid.UUID", total: "Decimal | None" = None) -> None: ...  # noqa: A002, UP037

    assert sent(task, uuid.UUID(int=3)) == {"id": uuid.UUID(int=3), "total": None}


def test_an_unresolvable_annotation_does_not_affect_the_others() -> None:
    def task(id: uuid.UUID, other: OnlyForTypeCheckers) -> None: ...  # noqa: A002

    assert sent(task, uuid.UUID(int=3), {"plain": 1}) == {"id": uuid.UUID(int=3), "other": {"plain": 1}}


def test_a_default_of_none_makes_a_parameter_optional() -> None:
    def task(x: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013 - as people write it

    assert sent(task) == {"x": None}


def test_a_mutable_default_is_sent_too() -> None:
    def task(x: list[int] = [1]) -> None: ...  # noqa: B006

    assert sent(task) == {"x": [1]}


@pytest.mark.parametrize("annotation", [Unknown, object, Callable, Iterable[int], "no such name", Unknown | None])
def test_a_meaningless_annotation_accepts_plain_values_only(annotation: Any) -> None:
    task = taking(x=annotation, y=uuid.UUID)
    assert sent(task, [1], uuid.UUID(int=1)) == {"x": [1], "y": uuid.UUID(int=1)}
    with pytest.raises(EncodeError, match=r"task 't', argument 'x'.*nothing was sent"):
        sent(task, Unknown(), uuid.UUID(int=1))


@pytest.mark.parametrize("value", [Decimal(1), uuid.UUID(int=1), {1}, datetime(2026, 1, 1), Unknown(), 2**64])
def test_without_an_annotation_lossy_values_are_refused(value: Any) -> None:
    def task(x, **rest) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(EncodeError, match="argument 'x'"):
        sent(task, value)
    with pytest.raises(EncodeError, match="argument 'other'"):
        sent(task, 1, other=value)


def test_without_an_annotation_a_default_does_not_restrict_the_value() -> None:
    def task(x, y=None, z=1) -> None: ...  # type: ignore[no-untyped-def]

    when = datetime(2026, 1, 1, tzinfo=UTC)
    given = {"x": {1: [b"a", 1.5]}, "y": {"deep": [when]}, "z": "text"}
    assert sent(task, **given) == given
    assert on_the_wire(task, **given) == given
    assert sent(task, 1) == {"x": 1, "y": None, "z": 1}
    assert Arguments(task, "t").decode(encode_value({"x": 1})) == {"x": 1}


def test_encoding_does_not_change_the_callers_arguments() -> None:
    def task(x) -> None: ...  # type: ignore[no-untyped-def]

    given = {"x": [1]}
    Arguments(task, "t").encode((), given)
    assert given == {"x": [1]}


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, "task 't': missing a required argument: 'to'; nothing was sent"),
        (("a", "b", "c"), {}, "task 't': too many positional arguments"),
        (("a",), {"bogus": 1}, "task 't': got an unexpected keyword argument 'bogus'"),
        (("a",), {"to": "b"}, "task 't': multiple values for argument 'to'"),
    ],
)
def test_a_call_that_does_not_match_the_signature_is_a_type_error(args: Any, kwargs: Any, says: str) -> None:
    def task(to: str, subject: str = "hi") -> None: ...

    with pytest.raises(TypeError, match=says):
        sent(task, *args, **kwargs)


@pytest.mark.parametrize(
    ("annotation", "bad"),
    [
        (str, 5),
        (int, "5"),
        (int, 1.5),
        (int, True),
        (Colour, "blue"),
        (Invoice, {"number": "x"}),
        (list[int], ["a"]),
        (uuid.UUID, "x"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_by_name(annotation: Any, bad: Any) -> None:
    with pytest.raises(EncodeError, match=r"task 't': .*\$\.to.*; nothing was sent"):
        sent(taking(first=int, to=annotation), 1, bad)


def test_extra_keyword_arguments_are_sent_with_typed_ones() -> None:
    def task(id: uuid.UUID, **rest: Any) -> None: ...  # noqa: A002

    assert sent(task, uuid.UUID(int=1), colour="red", size=3) == {"id": uuid.UUID(int=1), "colour": "red", "size": 3}
    assert sent(task, uuid.UUID(int=1)) == {"id": uuid.UUID(int=1)}


def test_parameters_without_a_name_are_refused() -> None:
    def positional(x: int, /) -> None: ...

    def many(*values: int) -> None: ...

    for function, name in ((positional, "x"), (many, "values")):
        with pytest.raises(ConfigError, match=f"parameter '{name}' is positional-only or"):
            Arguments(function, "t")


def test_parameters_with_defaults_may_be_missing_in_a_payload() -> None:
    """The job was added before the parameter existed, or by a client that does not know it."""

    def task(to: str, subject: str = "hi", tags: list[str] = []) -> None: ...  # noqa: B006

    assert Arguments(task, "t").decode(encode_value({"to": "ada"})) == {"to": "ada"}


def test_unknown_arguments_in_a_payload_are_ignored() -> None:
    def task(to: str) -> None: ...

    assert Arguments(task, "t").decode(encode_value({"to": "ada", "gone": 1})) == {"to": "ada"}


@pytest.mark.parametrize("payload", [{}, {"to": 5}, [], "ada", None, 7])
@pytest.mark.parametrize("rest", [True, False])
def test_a_payload_that_does_not_match_is_a_decode_error(payload: Any, rest: bool) -> None:
    def plain(to: str) -> None: ...

    def with_rest(to: str, **rest: Any) -> None: ...

    with pytest.raises(DecodeError, match="call of t"):
        Arguments(with_rest if rest else plain, "t").decode(encode_value(payload))


# --- results


@pytest.mark.parametrize(("annotation", "value"), TYPED_VALUES, ids=lambda part: str(part)[:30])
def test_a_result_is_decoded_as_its_annotation(annotation: Any, value: Any) -> None:
    results = Results(taking(**{"return": annotation}))
    came = results.convert(decode_value(results.encode(value)))
    assert came == value
    assert type(came) is type(value)


def test_a_result_that_does_not_match_its_annotation_is_unchanged() -> None:
    def task() -> int: ...  # type: ignore[empty-body]

    results = Results(task)
    assert results.convert(decode_value(results.encode("no number"))) == "no number"


def test_a_result_without_an_annotation_must_be_plain() -> None:
    def task(): ...  # type: ignore[no-untyped-def]

    with pytest.raises(EncodeError):
        Results(task).encode({1})


# --- functions that cannot be tasks


def test_an_object_that_cannot_be_a_task_is_refused_with_advice() -> None:
    queue = Queue("q")

    def values() -> Iterable[int]:
        yield 1

    async def values_in_time() -> Any:
        yield 1

    def plain() -> None: ...

    for bad, says in [
        ("mail", "@queue.task\\(name='mail'\\)"),
        (functools.partial(plain), "wrap .* in one"),
        (Unknown, "wrap .* in one"),
        (values, "contains yield; a task must return a single value"),
        (values_in_time, "contains yield; a task must return a single value"),
        (print, "cannot read the signature|is positional-only or"),
    ]:
        with pytest.raises(ConfigError, match=says):
            queue.task(bad)  # type: ignore[call-overload]
    assert queue.tasks == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": 0}, "timeout must be a number of seconds above 0; got 0"),
        ({"timeout": True}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"attempts": -1}, "max_attempts"),
        ({"backoff": {"kind": "linear", "delay_ms": 1}}, "backoff.kind"),
        ({"name": "n" * 257}, "task name"),
        ({"process": "yes"}, "process"),
        ({"process": True}, "needs a function at module level"),
    ],
)
def test_invalid_options_of_a_task_are_refused(options: dict[str, Any], says: str) -> None:
    queue = Queue("q")

    def task() -> None: ...

    with pytest.raises(ConfigError, match=says):
        queue.task(**options)(task)
    assert queue.tasks == {}


def test_two_tasks_with_the_same_name_are_refused() -> None:
    queue = Queue("q")

    @queue.task
    def mail() -> None: ...

    with pytest.raises(ConfigError, match=r"already has a task named 'mail'; choose another with name=\.\.\."):
        queue.task(name="mail")(lambda: None)
    assert queue.tasks["mail"] is mail


async def test_a_task_can_be_called_like_the_function() -> None:
    queue = Queue("q")

    @queue.task
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    @queue.task(name="later")
    async def double_later(x: int) -> int:
        return 2 * x

    assert double(4) == 8
    assert await double_later(4) == 8
    assert (double.__name__, double.__doc__, double_later.name) == ("double", "Twice.", "later")


# --- pydantic


def test_a_result_whose_validator_fails_in_any_way_stays_as_it_is() -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

    class Order(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        count: int

        @pydantic.field_validator("count")  # type: ignore[untyped-decorator]
        @classmethod
        def check(cls, value: int) -> int:
            raise (TypeError if value else ValueError)("not today")

    def function() -> None: ...

    function.__annotations__["return"] = Order
    for count in (0, 1):
        assert Results(function).convert({"count": count}) == {"count": count}


def test_pydantic_models_can_be_arguments_and_results() -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")
    order = pydantic.create_model("Order", article=(str, ...), count=(int, 1))
    task = taking(one=order, many=list[order], **{"return": order})
    value = order(article="tea", count=2)
    assert sent(task, value, [value]) == {"one": value, "many": [value]}
    assert on_the_wire(task, value, []) == {"one": {"article": "tea", "count": 2}, "many": []}
    results = Results(task)
    assert results.convert(decode_value(results.encode(value))) == value
    with pytest.raises(EncodeError, match=r"\$\.one"):
        sent(task, "tea", [])
    with pytest.raises(DecodeError, match="article"):
        Arguments(task, "t").decode(encode_value({"one": {"count": 1}, "many": []}))
