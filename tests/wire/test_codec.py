"""Codecs: what they seal opens only in its place, with its key, unchanged."""

from __future__ import annotations

import base64
import hmac
import os
import subprocess
import sys

import pytest

from tampu.errors import ConfigError, DecodeError
from tampu.wire import codec as codecs
from tampu.wire.codec import (
    EncryptedCodec,
    PayloadCodec,
    QueueCodec,
    SignedCodec,
    codec_from_environment,
    describe_sealed,
    sealed_content,
)
from tampu.wire.payload import decode_slot, decode_value, encode_slot, encode_value, wrap_bin

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
KINDS = [SignedCodec, EncryptedCodec]
PLAIN = encode_value({"to": "ada"})

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_payload_opens_in_its_place_only(kind: type[SignedCodec | EncryptedCodec]) -> None:
    codec = kind({"k": KEY})
    sealed = QueueCodec(codec, "emails").seal_payload(PLAIN, "welcome")
    assert QueueCodec(codec, "emails").open_payload(sealed, "welcome") == PLAIN
    for queue, name in [("emails", "refund"), ("orders", "welcome"), ("emails", ""), ("email", "swelcome")]:
        with pytest.raises(DecodeError, match="another task"):
            QueueCodec(codec, queue).open_payload(sealed, name)


@kinds
def test_a_codec_does_not_mix_up_names_that_it_opens_in_turn(kind: type[SignedCodec | EncryptedCodec]) -> None:
    codec = QueueCodec(kind({"k": KEY}), "emails")
    large = encode_value({"body": "x" * 1000})
    slots = {name: wrap_bin(codec.seal_payload(large, name)) for name in ("welcome", "refund")}
    for name in ("welcome", "refund", "refund", "welcome"):
        assert codec.open_slot(slots[name], name) == large
        codec.seal_result(PLAIN, "job-1")
        with pytest.raises(DecodeError, match="another task"):
            codec.open_slot(slots[name], "refund" if name == "welcome" else "welcome")


@kinds
def test_a_result_opens_for_its_job_only_and_is_no_payload(kind: type[SignedCodec | EncryptedCodec]) -> None:
    codec = QueueCodec(kind({"k": KEY}), "q")
    sealed = codec.seal_result(PLAIN, "job-1")
    assert codec.open_result(sealed, "job-1") == PLAIN
    for open_it in (lambda: codec.open_result(sealed, "job-2"), lambda: codec.open_payload(sealed, "job-1")):
        with pytest.raises(DecodeError):
            open_it()


@kinds
def test_every_changed_byte_is_noticed(kind: type[SignedCodec | EncryptedCodec]) -> None:
    codec = QueueCodec(kind({"k": KEY}), "q")
    sealed = codec.seal_payload(PLAIN, "t")
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        with pytest.raises(DecodeError):
            codec.open_payload(bytes(changed), "t")
    for end in range(len(sealed)):
        with pytest.raises(DecodeError):
            codec.open_payload(sealed[:end], "t")


@kinds
def test_keys_are_rotated_by_putting_the_new_one_first(kind: type[SignedCodec | EncryptedCodec]) -> None:
    old = QueueCodec(kind({"old": KEY}), "q")
    both = QueueCodec(kind({"new": OTHER, "old": KEY}), "q")
    new = QueueCodec(kind({"new": OTHER}), "q")
    assert both.open_payload(old.seal_payload(PLAIN, "t"), "t") == PLAIN
    assert new.open_payload(both.seal_payload(PLAIN, "t"), "t") == PLAIN
    with pytest.raises(DecodeError, match="sealed with key 'old', which this process does not have"):
        new.open_payload(old.seal_payload(PLAIN, "t"), "t")


@kinds
def test_plain_payloads_are_refused_unless_they_are_accepted(kind: type[SignedCodec | EncryptedCodec]) -> None:
    with pytest.raises(DecodeError, match="neither encrypted nor signed"):
        QueueCodec(kind({"k": KEY}), "q").open_payload(PLAIN, "t")
    assert QueueCodec(kind({"k": KEY}, accept_plain=True), "q").open_payload(PLAIN, "t") == PLAIN


@kinds
def test_a_peer_without_the_codec_sees_bytes(kind: type[SignedCodec | EncryptedCodec]) -> None:
    sealed = QueueCodec(kind({"2026-11": KEY}), "q").seal_payload(PLAIN, "t")
    value = decode_value(sealed)
    assert isinstance(value, bytes)
    content = sealed_content(sealed)
    assert content is not None
    how = "signed" if kind is SignedCodec else "encrypted"
    assert describe_sealed(content) == f"{how} with key 2026-11, {len(content)} bytes"


def test_a_slot_of_bytes_stays_a_slot_of_bytes() -> None:
    codec = QueueCodec(SignedCodec({"k": KEY}), "q")
    slot = wrap_bin(codec.seal_payload(encode_value(b"raw"), "t"))
    assert codec.open_slot(slot, "t") == encode_slot(b"raw")
    plain = wrap_bin(codec.seal_payload(encode_value("text"), "t"))
    assert codec.open_slot(plain, "t") == encode_value("text")
    assert decode_slot(codec.open_slot(slot, "t")) == b"raw"


def test_encrypting_twice_gives_different_bytes_that_hold_no_plain_text() -> None:
    codec = QueueCodec(EncryptedCodec({"k": KEY}), "q")
    first, second = (codec.seal_payload(PLAIN, "t") for _ in range(2))
    assert first != second
    assert b"ada" not in first


@kinds
@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_many_values_are_sealed_as_one_by_one(kind: type[SignedCodec | EncryptedCodec], count: int) -> None:
    codec = QueueCodec(kind({"k": KEY}), "q")
    plains = [encode_value("x" * number) for number in range(count)]
    jobs = [f"job-{number}" for number in range(count)]
    payloads, results = codec.seal_payloads(plains, "t"), codec.seal_results(plains, jobs)
    assert [codec.open_payload(sealed, "t") for sealed in payloads] == plains
    assert [codec.open_result(sealed, job) for sealed, job in zip(results, jobs, strict=True)] == plains


def test_values_that_are_encrypted_together_share_no_nonce() -> None:
    codec = EncryptedCodec({"k": KEY})
    sealed = codec.seal_many([b"x"] * 300, [b""] * 300) + codec.seal_many([b"x"] * 300, [b""] * 300)
    assert len({one[19:31] for one in sealed}) == 600


@kinds
def test_a_slot_signed_or_encrypted_with_an_older_key_opens(kind: type[SignedCodec | EncryptedCodec]) -> None:
    for old_id in ("k1", "longer"):  # as long as the new one, and not
        old, both = QueueCodec(kind({old_id: KEY}), "q"), QueueCodec(kind({"k2": OTHER, old_id: KEY}), "q")
        slots = [wrap_bin(codec.seal_payload(PLAIN, "t")) for codec in (old, both, old, both)]
        open_slot = both.slot_opener("t")
        assert [open_slot(slot) for slot in slots] == [PLAIN] * 4
        assert [open_slot(slot) for slot in slots] == [PLAIN] * 4  # now all keys are known


class Reversed(SignedCodec):
    """A subclass that seals and opens in its own way."""

    def seal(self, plain: bytes, context: bytes) -> bytes:
        return super().seal(plain[::-1], context)

    def open(self, sealed: bytes, context: bytes) -> bytes:
        return super().open(sealed, context)[::-1]


def test_a_subclass_may_seal_in_its_own_way() -> None:
    codec, inherited = QueueCodec(Reversed({"k": KEY}), "q"), QueueCodec(SignedCodec({"k": KEY}), "q")
    (sealed,) = codec.seal_payloads([PLAIN], "t")
    assert codec.open_slot(wrap_bin(sealed), "t") == PLAIN
    assert inherited.open_slot(wrap_bin(sealed), "t") == PLAIN[::-1]
    (result,) = codec.seal_results([PLAIN], ["job"])
    assert inherited.open_result(result, "job") == PLAIN[::-1]
    assert not codec.seals_many


def test_a_process_derives_a_new_key_before_nonces_could_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "USES_PER_KEY", 3)
    codec = EncryptedCodec({"k": KEY})
    codec._uses = 3
    salts = {codec.seal(b"x", b"")[3:19] for _ in range(9)}
    assert len(salts) == 3


def test_salts_of_strangers_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "MAX_DERIVED_KEYS", 5)
    codec = EncryptedCodec({"k": KEY})
    for _ in range(20):
        with pytest.raises(DecodeError):
            codec.open(b"\x02\x01k" + os.urandom(60), b"")
    assert len(codec._derived) == 5


@kinds
def test_keys_are_shown_nowhere(kind: type[SignedCodec | EncryptedCodec]) -> None:
    secret = base64.b64encode(KEY).decode()
    assert repr(kind({"a": secret, "b": OTHER})) == f"{kind.__name__}(keys: a, b)"
    for bad in ("short", b"short", secret[:-4], secret + "x", 5, None):
        with pytest.raises(ConfigError) as raised:
            kind({"k": bad})  # type: ignore[dict-item]  # the point of the test
        assert str(bad) not in str(raised.value) or bad in (5, None)


@pytest.mark.parametrize("keys", [{}, {"": KEY}, {"x" * 65: KEY}, {"a\n": KEY}])
def test_a_codec_without_a_usable_key_id_is_refused(keys: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError):
        SignedCodec(keys)


def test_the_environment_names_the_codec_and_its_keys() -> None:
    keys = f"new:{base64.b64encode(OTHER).decode()}, old:{base64.urlsafe_b64encode(KEY).decode()}"
    assert codec_from_environment({}) is None
    for kind, made in (("signed", SignedCodec), ("encrypted", EncryptedCodec)):
        found = codec_from_environment({"TAMPU_CODEC": kind, "TAMPU_CODEC_KEYS": keys})
        assert isinstance(found, made)
        assert found.key_ids == ("new", "old")
    custom = codec_from_environment({"TAMPU_CODEC": "wire.test_codec:CUSTOM"})
    assert isinstance(custom, PayloadCodec)
    for kind in ("other", "wire.test_codec:KEY"):
        with pytest.raises(ConfigError, match="TAMPU_CODEC must be encrypted, signed, or module:attribute"):
            codec_from_environment({"TAMPU_CODEC": kind})
    with pytest.raises(ConfigError, match="TAMPU_CODEC_KEYS must be id:base64") as raised:
        codec_from_environment({"TAMPU_CODEC": "signed", "TAMPU_CODEC_KEYS": "s3cret"})
    assert "s3cret" not in str(raised.value)


class Backwards:
    """A codec of an application."""

    def seal(self, plain: bytes, context: bytes) -> bytes:
        return plain[::-1]

    def open(self, sealed: bytes, context: bytes) -> bytes:
        return sealed[::-1]


CUSTOM = Backwards()


def test_the_signature_is_hmac_sha256() -> None:
    sealed = SignedCodec({"k": KEY}).seal(b"plain", b"context")
    signed = b"\x01\x01k" + (7).to_bytes(4, "big") + b"context" + b"plain"
    assert sealed == b"\x01\x01k" + hmac.digest(KEY, signed, "sha256") + b"plain"


@kinds
@pytest.mark.parametrize("size", [0, 100, 250, 1000, 65_400, 65_535, 70_000])
def test_payloads_of_all_sizes_open(kind: type[SignedCodec | EncryptedCodec], size: int) -> None:
    codec = QueueCodec(kind({"k": KEY}), "q")
    for value in ("x" * size, b"x" * size, ["x" * size]):
        slot = wrap_bin(codec.seal_payload(encode_value(value), "t"))
        assert decode_slot(codec.open_slot(slot, "t")) == value


FORKED = """
import os
import subprocess
import sys
from tampu import EncryptedCodec
codec = EncryptedCodec({"k": bytes(32)})
nonces = lambda count: {codec.seal(b"x", b"")[19:31] for _ in range(count)}
before, (reading, writing) = nonces(1), os.pipe()
if os.fork() == 0:
    os.write(writing, b"".join(nonces(100)))
    os._exit(0)
childs = os.read(reading, 1200)
parents = nonces(100) | before
print(len(parents | {childs[at : at + 12] for at in range(0, 1200, 12)}))
"""


def test_a_fork_uses_no_nonce_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert done.stdout == "201\n", done.stderr


def test_an_encrypted_payload_that_ends_inside_its_nonce_is_refused() -> None:
    codec = EncryptedCodec({"k": KEY})
    sealed = codec.seal(b"x", b"")
    assert codec.open(sealed, b"") == b"x"  # from now on, its salt is known
    for end in range(len(sealed)):
        with pytest.raises(DecodeError):
            codec.open(sealed[:end], b"")
