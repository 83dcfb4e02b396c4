"""Payload codecs: encrypt or sign payloads and results, so that the server's other users cannot read or forge them.

    queue = Queue("emails", codec=EncryptedCodec({"2026-11": KEY}))

A sealed value is a MessagePack bin: the marker 0xC1 "TS", then the codec's bytes. A peer without the codec sees bytes.
Each value is bound to its place: a payload to its queue and the job's name, a result to its queue and the job's ID. It
is not bound to the payload's job ID, attempt or options, so that retries, replays and schedules keep working.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from tampu.base.checks import check_bool, invalid
from tampu.base.targets import load_target
from tampu.errors import ConfigError, DecodeError
from tampu.wire.payload import BIN_LEADS, bin_header, wrap_bin
from tampu.wire.scan import REFUSALS, bin_content

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: First bytes of a sealed value. MessagePack never uses 0xC1, so no plain value starts with them.
SEALED = b"\xc1TS"
#: Environment variables that name the codec and its keys for the command line and Spark.
CODEC_VARIABLE = "TAMPU_CODEC"
KEYS_VARIABLE = "TAMPU_CODEC_KEYS"
#: Size of a key, in bytes.
KEY_BYTES = 32
#: Longest ID of a key, in bytes.
MAX_KEY_ID_BYTES = 64
#: Derived keys of other processes that are kept for decrypting.
MAX_DERIVED_KEYS = 1024
#: Payloads after which a process derives a new key: random nonces of AES-GCM are safe for 2^32 uses of one key.
USES_PER_KEY = 2**30

_SIGNED, _ENCRYPTED = b"\x01", b"\x02"
_MAC_BYTES = 32
_SALT_BYTES = 16
_NONCE_BYTES = 12
_MARKER_BYTES = len(SEALED)

_decode_bin = msgspec.msgpack.Decoder(bytes).decode


@runtime_checkable
class PayloadCodec(Protocol):
    """Seals and opens bytes. `context` says where they belong: what was sealed for one context opens in no other."""

    def seal(self, plain: bytes, context: bytes) -> bytes:
        """Return the sealed form."""
        ...

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """Return what was sealed. Raises `DecodeError` if it was changed, or sealed for another context or key."""
        ...


class _Keys:
    """The keys of a codec by their IDs; the first one seals."""

    def __init__(self, keys: Mapping[str, bytes | str], kind: bytes, *, accept_plain: bool) -> None:
        if not keys:
            raise ConfigError("a codec needs a key: pass {'2026-11': KEY}, with 32 random bytes as base64")
        #: Whether payloads that are not sealed are accepted: for the time until all producers have the codec.
        self.accept_plain = check_bool("accept_plain", accept_plain)
        self._by_id = {_check_key_id(key_id): _check_key(key_id, key) for key_id, key in keys.items()}
        self._first = next(iter(self._by_id))
        self._kind = kind
        self._header = self._header_of(self._first)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """IDs of the keys; the first one seals."""
        return tuple(self._by_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys: {', '.join(self._by_id)})"

    def _header_of(self, key_id: str) -> bytes:
        encoded = key_id.encode()
        return b"%b%c%b" % (self._kind, len(encoded), encoded)

    def _key_of(self, sealed: bytes) -> tuple[str, int]:
        """Return the key's ID, and where its header ends."""
        end = 2 + (sealed[1] if len(sealed) > 1 else 0)
        if sealed[:1] != self._kind or len(sealed) < end:
            raise DecodeError(f"payload was not sealed by {type(self).__name__}")
        key_id = sealed[2:end].decode(errors="replace")
        if key_id not in self._by_id:
            raise DecodeError(f"payload was sealed with key {key_id!r}, which this process does not have")
        return key_id, end


class SignedCodec(_Keys):
    """Signs payloads and results with HMAC-SHA256. They stay readable, but cannot be forged or changed.

    Args:
        keys: 32 random bytes by ID, as bytes or base64. The first key signs, all verify. To rotate keys, add
            the new one at the end, then move it to the front (deploy each step everywhere), and remove the old one
            when no job signed with it is left.
        accept_plain: Accept payloads that are not signed, until all producers sign. Defaults to False.
    """

    def __init__(self, keys: Mapping[str, bytes | str], *, accept_plain: bool = False) -> None:
        super().__init__(keys, _SIGNED, accept_plain=accept_plain)
        self._macs = {key_id: _Mac(self._header_of(key_id), key) for key_id, key in self._by_id.items()}
        self._mac = self._macs[self._first]

    def seal(self, plain: bytes, context: bytes) -> bytes:
        """Return the payload with its signature."""
        return b"%b%b%b" % (self._header, self._mac.of(context, plain), plain)

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """Return the payload. Raises `DecodeError` if the signature does not match."""
        if sealed.startswith(self._header):
            mac, end = self._mac, len(self._header)
        else:
            key_id, end = self._key_of(sealed)
            mac = self._macs[key_id]
        plain_at = end + _MAC_BYTES
        plain = sealed[plain_at:]
        if not hmac.compare_digest(sealed[end:plain_at], mac.of_next(context, plain)):
            raise DecodeError("the signature of the payload does not match: it was changed, or made for another task")
        return plain


class EncryptedCodec(_Keys):
    """Encrypts payloads and results with AES-256-GCM, which also protects them against changes. Needs `tampu[crypto]`.

    Args:
        keys: 32 random bytes by ID, as bytes or base64. The first key encrypts, all decrypt. To rotate keys,
            add the new one at the end, then move it to the front (deploy each step everywhere), and remove the old
            one when no job encrypted with it is left.
        accept_plain: Accept payloads that are not encrypted, until all producers encrypt. Defaults to False.
    """

    def __init__(self, keys: Mapping[str, bytes | str], *, accept_plain: bool = False) -> None:
        super().__init__(keys, _ENCRYPTED, accept_plain=accept_plain)
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                "EncryptedCodec needs the package cryptography, which is not installed; run pip install 'tampu[crypto]'"
            ) from error
        self._cipher: Callable[[bytes], Any] = AESGCM
        self._invalid: type[Exception] = InvalidTag
        #: Ciphers, each with its header, by the header and salt of the sealed bytes.
        self._derived: OrderedDict[bytes, tuple[Any, bytes]] = OrderedDict()
        self._salt_end = len(self._header) + _SALT_BYTES
        self._uses = USES_PER_KEY
        self._salted = b""

    def seal(self, plain: bytes, context: bytes) -> bytes:
        """Return the encrypted payload."""
        # Each process derives its own key from a random salt, so that random nonces stay far below their limit.
        if self._uses >= USES_PER_KEY:
            self._salted, self._uses = self._header + os.urandom(_SALT_BYTES), 0
        self._uses += 1
        salted = self._salted
        found = self._derived.get(salted) or self._derive(self._first, salted)
        # Drawn for each payload: nonces kept in memory would be used twice by forks and by restored snapshots.
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join((salted, nonce, found[0].encrypt(nonce, plain, found[1] + context)))

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """Return the payload. Raises `DecodeError` if it was changed, or encrypted for another place."""
        end = self._salt_end
        found = self._derived.get(sealed[:end])
        if found is None:  # a process that has not been seen yet, or an ID of another length
            key_id, header_end = self._key_of(sealed)
            end = header_end + _SALT_BYTES
            if len(sealed) < end:
                raise DecodeError("the encrypted payload is too short")
            salted = sealed[:end]
            found = self._derived.get(salted) or self._derive(key_id, salted)
        nonce_end = end + _NONCE_BYTES
        try:
            plain: bytes = found[0].decrypt(sealed[end:nonce_end], sealed[nonce_end:], found[1] + context)
        except (self._invalid, ValueError):  # the latter if it ends inside the nonce
            raise DecodeError("payload cannot be decrypted: it was changed, or encrypted for another task") from None
        return plain

    def _derive(self, key_id: str, salted: bytes) -> tuple[Any, bytes]:
        """Return the cipher for a header and a salt, and the header."""
        header, salt = salted[:-_SALT_BYTES], salted[-_SALT_BYTES:]
        derived = hmac.digest(self._by_id[key_id], b"tampu payload key\0" + salt, "sha256")
        found = self._derived[salted] = self._cipher(derived), header
        while len(self._derived) > MAX_DERIVED_KEYS:  # salts of unknown senders must not fill the memory
            self._derived.popitem(last=False)
        return found


class QueueCodec:
    """Seals and opens the payloads and results of one queue."""

    __slots__ = ("_accepts_plain", "_codec", "_last_context", "_payload_context", "_result_context")

    def __init__(self, codec: PayloadCodec, queue_name: str) -> None:
        self._codec = codec
        self._accepts_plain = bool(getattr(codec, "accept_plain", False))
        # A queue's name has no NUL, so that no two contexts are alike.
        self._payload_context = b"payload\0%b\0" % queue_name.encode()
        self._result_context = b"result\0%b\0" % queue_name.encode()
        #: The last job name and its context: nearly always the same as for the previous job.
        self._last_context = "", self._payload_context

    @classmethod
    def of(cls, codec: PayloadCodec | None, queue_name: str) -> QueueCodec | None:
        """Return the codec for a queue; None without one."""
        return None if codec is None else cls(codec, queue_name)

    def seal_payload(self, packed: bytes, name: str) -> bytes:
        """Return MessagePack sealed for jobs of this name, as MessagePack."""
        return _wrapped(self._codec.seal(packed, self._context_of(name)))

    def open_payload(self, packed: bytes, name: str) -> bytes:
        """Return the MessagePack in a sealed payload. Raises `DecodeError`."""
        return self._open(packed, self._context_of(name))

    def _context_of(self, name: str) -> bytes:
        last = self._last_context  # replaced as a whole: threads call this too
        if last[0] != name:
            last = self._last_context = name, self._payload_context + name.encode()
        return last[1]

    def open_slot(self, slot: bytes, name: str) -> bytes:
        """Return the payload slot that a sealed one stands for. Raises `DecodeError`."""
        try:
            content = _decode_bin(_decode_bin(slot))  # in C: this runs once per job
        except REFUSALS:
            content = b""
        if not content.startswith(SEALED):
            packed = bin_content(slot)
            return _as_slot(self.open_payload(slot if packed is None else packed, name))
        last = self._last_context
        opened = self._codec.open(content[_MARKER_BYTES:], last[1] if last[0] == name else self._context_of(name))
        return wrap_bin(opened) if opened[:1] in BIN_LEADS else opened

    def seal_result(self, packed: bytes, job_id: str) -> bytes:
        """Return a result sealed for its job."""
        return _wrapped(self._codec.seal(packed, self._result_context + job_id.encode()))

    def open_result(self, packed: bytes, job_id: str) -> bytes:
        """Return the MessagePack in a sealed result. Raises `DecodeError`."""
        return self._open(packed, self._result_context + job_id.encode())

    def _open(self, packed: bytes, context: bytes) -> bytes:
        sealed = sealed_content(packed)
        if sealed is not None:
            return self._codec.open(sealed, context)
        if self._accepts_plain:
            return packed
        raise DecodeError("payload is neither encrypted nor signed, but the codec of this queue requires it")


def sealed_content(packed: bytes) -> bytes | None:
    """Return the codec's bytes if MessagePack holds a sealed value, else None."""
    content = bin_content(packed)
    return content[_MARKER_BYTES:] if content is not None and content.startswith(SEALED) else None


def describe_sealed(sealed: bytes) -> str:
    """Describe a sealed value whose key is not known, for tools: `encrypted with key 2026-11, 1,024 bytes`."""
    how = {_SIGNED: "signed", _ENCRYPTED: "encrypted"}.get(sealed[:1])
    if how is None or len(sealed) < 2:
        return f"sealed by another codec, {len(sealed):,} bytes"
    return f"{how} with key {sealed[2 : 2 + sealed[1]].decode(errors='replace')}, {len(sealed):,} bytes"


def codec_from_environment(environ: Mapping[str, str] = os.environ) -> PayloadCodec | None:
    """Return the codec for the command line and Spark; None if `TAMPU_CODEC` is not set.

    `TAMPU_CODEC` is `encrypted`, `signed` or `module:attribute`; `TAMPU_CODEC_KEYS` is `id:base64,id:base64`.
    """
    kind = environ.get(CODEC_VARIABLE, "")
    return _codec_of(kind, environ.get(KEYS_VARIABLE, "")) if kind else None


@lru_cache(maxsize=8)  # once per process, not once per row
def _codec_of(kind: str, keys: str) -> PayloadCodec:
    if ":" in kind:
        found = load_target(kind)
        if not isinstance(found, PayloadCodec):
            raise invalid(CODEC_VARIABLE, kind, "encrypted, signed, or module:attribute of a codec")
        return found
    if kind == "encrypted":
        return EncryptedCodec(parse_keys(keys))
    if kind == "signed":
        return SignedCodec(parse_keys(keys))
    raise invalid(CODEC_VARIABLE, kind, "encrypted, signed, or module:attribute of a codec")


def parse_keys(text: str) -> dict[str, str]:
    """Return the keys in `id:base64,id:base64`. Errors do not show the text."""
    keys: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key_id, colon, key = part.partition(":")
        if not colon:
            raise ConfigError(f"{KEYS_VARIABLE} must be id:base64, several joined by commas")
        keys[key_id.strip()] = key.strip()
    return keys


def _wrapped(sealed: bytes) -> bytes:
    size = len(sealed) + _MARKER_BYTES
    return b"\xc4%c%b%b" % (size, SEALED, sealed) if size < 0x100 else b"%b%b%b" % (bin_header(size), SEALED, sealed)


def _as_slot(packed: bytes) -> bytes:
    """Return MessagePack as a payload slot; a bin must be wrapped, or it would be taken for the wrapping."""
    return wrap_bin(packed) if packed[:1] in BIN_LEADS else packed


class _Mac:
    """HMAC-SHA256 with one key. Faster than `hmac.digest`, because the key is hashed once, not for every job.

    It covers the header, the context and the payload; the length of the context separates it from what follows.
    """

    __slots__ = ("_header", "_inner", "_last", "_outer")

    def __init__(self, header: bytes, key: bytes) -> None:
        block = key.ljust(hashlib.sha256().block_size, b"\0")
        self._header = header
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))
        #: The last context of `of_next`, and the hash up to it: payloads of one task share it.
        self._last = b"", self._begin(b"")

    def of(self, context: bytes, plain: bytes) -> bytes:
        """Return the MAC."""
        inner = self._inner.copy()
        inner.update(b"%b%b%b%b" % (self._header, len(context).to_bytes(4, "big"), context, plain))
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()

    def of_next(self, context: bytes, plain: bytes) -> bytes:
        """Return the MAC. Faster than `of` for a large payload whose context is that of the last call."""
        last = self._last  # replaced as a whole: threads call this too
        if last[0] != context:
            last = self._last = context, self._begin(context)
        inner = last[1].copy()
        inner.update(plain)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()

    def _begin(self, context: bytes) -> hashlib._Hash:
        inner = self._inner.copy()
        inner.update(b"%b%b%b" % (self._header, len(context).to_bytes(4, "big"), context))
        return inner


def _check_key_id(key_id: object) -> str:
    if not isinstance(key_id, str) or not 0 < len(key_id.encode()) <= MAX_KEY_ID_BYTES or not key_id.isprintable():
        raise invalid("key ID", key_id, f"printable text of 1 to {MAX_KEY_ID_BYTES} bytes")
    return key_id


def _check_key(key_id: str, key: object) -> bytes:
    if isinstance(key, str):
        try:
            key = base64.b64decode(key.replace("-", "+").replace("_", "/"), validate=True)
        except binascii.Error:
            raise ConfigError(f"key {key_id!r} must be bytes or base64 (it is not shown)") from None
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ConfigError(f"key {key_id!r} must have {KEY_BYTES} random bytes (it is not shown)")
    return key
