"""Invalid input: every rule and error message of the JavaScript client, checked before anything is sent."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

import tampu.rsmq
from tampu.errors import ConfigError, EncodeError, Error
from tampu.rsmq import (
    InvalidFormat,
    InvalidValue,
    MessageNotString,
    MissingParameter,
    NoAttributeSupplied,
    PoolOptions,
    Rsmq,
    RsmqError,
    RsmqOptions,
)
from tampu.rsmq.options import check_duration, check_id, check_maxsize, check_qname, parse_int

#: No server listens there: a test that sends something fails.
NOWHERE = "redis://127.0.0.1:1"
ID = "a" * 32


@pytest.mark.parametrize("value", ["", None, 0])
def test_an_empty_name_is_a_missing_parameter(value: Any) -> None:
    with pytest.raises(MissingParameter, match=r"^No qname supplied$"):
        check_qname(value)
    with pytest.raises(MissingParameter, match=r"^No id supplied$"):
        check_id(value)


@pytest.mark.parametrize("value", ["a b", "a.b", "é", "n" * 161, "a\n", "a:b", "{a}", True, b"a", 1.5])
def test_a_name_of_the_wrong_form_is_refused(value: Any) -> None:
    with pytest.raises(InvalidFormat, match=r"^Invalid qname format$"):
        check_qname(value)


@pytest.mark.parametrize("value", ["a", "n" * 160, "A-Z_0", "rt", "Q", "queues"])
def test_a_name_of_the_right_form_is_accepted(value: str) -> None:
    assert check_qname(value) == value


def test_a_number_as_a_name_is_taken_as_text() -> None:
    assert check_qname(123) == "123"


@pytest.mark.parametrize("value", ["a" * 31, "a" * 33, "a" * 31 + "_", "a" * 32 + "\n", 1])
def test_an_id_of_the_wrong_form_is_refused(value: Any) -> None:
    with pytest.raises(InvalidFormat, match=r"^Invalid id format$"):
        check_id(value)


def test_an_id_may_have_colons() -> None:
    assert check_id(":" * 32) == ":" * 32


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (1.9, 1),
        ("7", 7),
        (" 7 ", 7),
        ("1abc", 1),
        ("-1", -1),
        ("+5", 5),
        ("0x10", 0),
        (-0.5, 0),
        ("abc", None),
        ("", None),
        ("٣", None),
        (math.nan, None),
        (math.inf, None),
        (True, None),
        (None, None),
        ([], None),
    ],
)
def test_numbers_are_read_as_parse_int_reads_them(value: Any, parsed: int | None) -> None:
    assert parse_int(value) == parsed


@pytest.mark.parametrize("value", [-1, 10_000_000, "abc", None, math.nan, True, timedelta(200), timedelta(-1)])
@pytest.mark.parametrize("item", ["vt", "delay"])
def test_a_duration_out_of_range_is_refused(item: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_duration(item, value)
    assert str(refused.value) == f"{item} must be between 0 and 9999999"
    assert refused.value.name == "invalidValue"


def test_a_timedelta_is_a_duration() -> None:
    assert check_duration("vt", timedelta(minutes=5)) == 300
    assert check_duration("vt", timedelta(milliseconds=1500), "ms") == 1500


def test_half_a_second_is_rejected_instead_of_truncated() -> None:
    with pytest.raises(InvalidValue, match="whole seconds"):
        check_duration("vt", timedelta(milliseconds=500))


def test_in_milliseconds_the_range_is_the_same() -> None:
    assert check_duration("vt", 9_999_999, "ms") == 9_999_999_000
    assert check_duration("vt", 0.25, "ms") == 250
    with pytest.raises(InvalidValue):
        check_duration("vt", 10_000_000, "ms")


@pytest.mark.parametrize("value", [1023, 65537, -2, 0, None, "abc", math.inf])
def test_a_maxsize_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^maxsize must be between 1024 and 65536$"):
        check_maxsize(value)


@pytest.mark.parametrize("value", [1024, 65536, -1])
def test_a_maxsize_in_range_is_accepted(value: int) -> None:
    assert check_maxsize(value) == value


@pytest.mark.parametrize(
    ("method", "arguments", "name", "text"),
    [
        ("create_queue", [""], "missingParameter", "No qname supplied"),
        ("create_queue", ["a b", -1], "invalidFormat", "Invalid qname format"),
        ("create_queue", ["q", -1, -1, 5], "invalidValue", "vt must be between 0 and 9999999"),
        ("create_queue", ["q", 1, -1, 5], "invalidValue", "delay must be between 0 and 9999999"),
        ("create_queue", ["q", 1, 1, 5], "invalidValue", "maxsize must be between 1024 and 65536"),
        ("delete_queue", [None], "missingParameter", "No qname supplied"),
        ("get_queue_attributes", ["a.b"], "invalidFormat", "Invalid qname format"),
        ("set_queue_attributes", ["a.b"], "noAttributeSupplied", "No attribute was supplied"),
        ("set_queue_attributes", ["a.b", -1], "invalidFormat", "Invalid qname format"),
        ("set_queue_attributes", ["q", -1, 5], "invalidValue", "vt must be between 0 and 9999999"),
        ("set_queue_attributes", ["q", None, 5, -1], "invalidValue", "maxsize must be between 1024 and 65536"),
        ("send_message", ["q", "x", -1], "invalidValue", "delay must be between 0 and 9999999"),
        ("send_message", ["q", 5], "messageNotString", "Message must be a string"),
        ("send_message", ["q", None], "messageNotString", "Message must be a string"),
        ("send_messages", ["q", ["x", {}]], "messageNotString", "Message must be a string"),
        ("receive_message", ["q", 10_000_000], "invalidValue", "vt must be between 0 and 9999999"),
        ("receive_messages", ["q", 1, "x"], "invalidValue", "vt must be between 0 and 9999999"),
        ("pop_message", [""], "missingParameter", "No qname supplied"),
        ("delete_message", ["q", ""], "missingParameter", "No id supplied"),
        ("delete_message", ["a.b", "bad"], "invalidFormat", "Invalid qname format"),
        ("delete_messages", ["q", [ID, "bad"]], "invalidFormat", "Invalid id format"),
        ("change_message_visibility", ["q", "bad", -1], "invalidFormat", "Invalid id format"),
        ("change_message_visibility", ["q", ID, None], "invalidValue", "vt must be between 0 and 9999999"),
    ],
)
async def test_every_operation_refuses_bad_input_before_it_sends_anything(
    method: str, arguments: list[Any], name: str, text: str
) -> None:
    rsmq = Rsmq(NOWHERE)
    with pytest.raises(RsmqError) as refused:
        await getattr(rsmq, method)(*arguments)
    assert (refused.value.name, str(refused.value)) == (name, text)
    assert isinstance(refused.value, Error)
    assert refused.value.code == "CMQ-010"


async def test_listening_and_receiving_refuse_bad_input_at_once() -> None:
    rsmq = Rsmq(NOWHERE)
    with pytest.raises(InvalidFormat):
        rsmq.listen("a b")
    with pytest.raises(InvalidValue):
        rsmq.listen("q", -1)
    with pytest.raises(ConfigError, match="poll_secs"):
        rsmq.listen("q", poll_secs=-1)
    with pytest.raises(InvalidFormat):
        async with rsmq.receiving("a b"):
            pass


@pytest.mark.parametrize("most", [0, -1, 1.5, True, None])
async def test_a_batch_size_must_be_a_positive_whole_number(most: Any) -> None:
    with pytest.raises(ConfigError, match="max"):
        await Rsmq(NOWHERE).receive_messages("q", most)


async def test_a_text_that_utf8_cannot_carry_is_refused() -> None:
    with pytest.raises(EncodeError, match="surrogates"):
        await Rsmq(NOWHERE).send_message("q", "\ud800")


async def test_an_encoder_that_makes_neither_text_nor_bytes_is_refused() -> None:
    with pytest.raises(MessageNotString) as refused:
        await Rsmq(NOWHERE).send_message("q", "x", encoder=lambda message: 5)  # type: ignore[arg-type,return-value]
    assert refused.value.value == 5


async def test_a_missing_attribute_is_reported_before_a_bad_name() -> None:
    with pytest.raises(NoAttributeSupplied):
        await Rsmq(NOWHERE).set_queue_attributes("")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ns": ""}, "ns"),
        ({"ns": 5}, "ns"),
        ({"realtime": 1}, "realtime"),
        ({"precision": "s"}, "precision"),
        ({"duration_unit": "us"}, "duration_unit"),
        ({"size_unit": "chars"}, "size_unit"),
        ({"send_once": None}, "send_once"),
        ({"patience_secs": -1}, "patience_secs"),
        ({"url": "http://x"}, "url scheme"),
    ],
)
def test_options_name_the_field_that_is_wrong(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}"):
        RsmqOptions(**settings)


@pytest.mark.parametrize(
    ("settings", "field"), [({"max_size": 0}, "max_size"), ({"max_size": 2, "min_idle": 3}, "min_idle")]
)
def test_pool_options_name_the_field_that_is_wrong(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        PoolOptions(**settings)


def test_a_client_is_made_from_options_a_url_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAMPU_URL", raising=False)
    assert Rsmq().options.url == "redis://127.0.0.1:6379"
    monkeypatch.setenv("TAMPU_URL", "redis://elsewhere")
    assert Rsmq().options.url == "redis://elsewhere"
    assert Rsmq("redis://there").options.url == "redis://there"
    assert Rsmq(RsmqOptions(ns="x")).options.ns == "x"
    with pytest.raises(ConfigError, match="options"):
        Rsmq({"ns": "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize("ns", ["rsmq", "{}", "{", "}{", "a}b{c", "{}x{y}"])
def test_on_a_cluster_a_namespace_without_a_hash_tag_is_refused(ns: str) -> None:
    with pytest.raises(ConfigError, match="hash tag"):
        RsmqOptions(url="redis+cluster://127.0.0.1:7000", ns=ns)


@pytest.mark.parametrize("ns", ["{rsmq}", "shop:{a}", "{a}{b}", "x{y}z"])
def test_on_a_cluster_a_namespace_with_a_hash_tag_is_accepted(ns: str) -> None:
    RsmqOptions(url="redis+cluster://127.0.0.1:7000", ns=ns)


def test_the_public_names() -> None:
    assert sorted(tampu.rsmq.__all__) == tampu.rsmq.__all__
    assert set(tampu.rsmq.__all__) == {
        *("Rsmq", "PooledRsmq", "RsmqSync", "RsmqConnection", "RsmqConnectionSync", "RsmqOptions", "PoolOptions"),
        *("RsmqMessage", "QueueAttributes", "TypedQueue", "Encoder", "Decoder"),
        *("RsmqError", "NoAttributeSupplied", "MissingParameter", "InvalidFormat", "InvalidValue", "MessageNotString"),
        *("MessageTooLong", "QueueNotFound", "QueueExists", "CannotDecodeMessage", "BatchInterrupted"),
    }
