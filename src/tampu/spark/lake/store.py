"""The files of a lake, in a local folder or an object store. No other module of the lake knows which of them it is.

obstore and delta-rs use the same Rust library, and so the same names of options and environment variables.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from tampu.base.checks import one_line
from tampu.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")
#: Schemes of object stores, and what delta-rs and obstore call them.
SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "abfss": "abfss", "abfs": "abfss", "az": "az"}
#: Options of the client, which obstore does not take from the others.
ALLOW_HTTP = ("aws_allow_http", "allow_http", "azure_allow_http")
#: How often a request is tried again while a store is checked; a wrong address must not take minutes.
CHECK_RETRIES = 2


@dataclass(frozen=True, slots=True)
class Store:
    """A folder, local or in an object store. It can be sent to executors; each process opens its own connections."""

    #: An absolute path, or a URI such as `s3://bucket/lake`.
    uri: str
    #: Settings of the store that override the environment. May hold credentials: not shown, logged or written.
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, lake: str | Path | Store, options: Mapping[str, str] | None = None) -> Store:
        """Return the store at a path or URI; `ConfigError` if it cannot hold a lake."""
        if isinstance(lake, Store):
            return lake
        if found := _URI.match(str(lake)):
            scheme, rest = found[1].lower(), str(lake)[found.end() :].rstrip("/")
            if scheme in SCHEMES:
                return cls(f"{SCHEMES[scheme]}://{rest}", tuple(sorted((options or {}).items())))
            if scheme != "file":
                raise ConfigError(
                    f"lake must be a path or a URI of {', '.join(SCHEMES)}; got {found[1]}://{rest}: mount other file "
                    "systems and pass the path"
                )
            lake = f"/{rest}"
        folder = str(Path(lake).absolute())
        if unquote(folder) != folder:  # delta-rs would decode them
            raise ConfigError(f"the path of a lake must not contain percent escapes such as %20, got {folder}")
        return cls(folder)

    def __truediv__(self, name: str) -> Store:
        return Store(f"{self.uri}/{name}", self.options)

    def __str__(self) -> str:
        return self.uri

    @property
    def folder(self) -> Path | None:
        """The local folder; None in an object store."""
        return Path(self.uri) if self.uri.startswith("/") else None

    @property
    def delta_options(self) -> dict[str, str] | None:
        """The options as delta-rs takes them."""
        return dict(self.options) or None

    def put(self, path: str, data: bytes) -> None:
        """Write a file, whole or not at all. Its name must be new: a request whose answer was lost is sent again."""
        _opened(self.uri, self.options, is_written=True).put(path, data)

    def read(self, path: str) -> bytes:
        """Return the contents of a file; `FileNotFoundError` if it is missing."""
        return bytes(_opened(self.uri, self.options).get(path).bytes())

    def parquet(self, path: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a Parquet file; columns that it does not have are left out.

        In one piece, and not through a file in Python: see `rows.query_table`.
        """
        file = pq.ParquetFile(pa.BufferReader(self.read(path)))
        present = set(file.schema_arrow.names)
        return file.read(columns=None if columns is None else [name for name in columns if name in present])

    def list(self, prefix: str = "") -> Iterator[Mapping[str, Any]]:
        """Yield `path`, `size` and `last_modified` of the files below a folder; of none if it does not exist."""
        from obstore.exceptions import BaseError

        try:
            for page in _opened(self.uri, self.options).list(prefix or None):
                yield from page
        except FileNotFoundError:
            return
        except (BaseError, PermissionError) as error:
            raise ConfigError(
                f"cannot read {self.uri}: {first_line(error)}: check the address, the credentials and permissions"
            ) from error

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if it is missing."""
        try:
            return int(_opened(self.uri, self.options).head(path)["size"])
        except FileNotFoundError:
            return None

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files."""
        if found := list(paths):
            _opened(self.uri, self.options).delete(found)

    def check_writable(self) -> None:
        """Raise `ConfigError` unless files can be written here, and a second writer of one file is refused."""
        name = f"_probe-{uuid.uuid4().hex}"
        try:
            if self.folder is not None:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds payloads and tracebacks
            store = _opened(self.uri, self.options, is_written=True, retries=CHECK_RETRIES)
            store.put(name, b"1", mode="create")
            try:
                with suppress(Exception):  # what a store answers differs
                    store.put(name, b"2", mode="create")
                    raise _Overwritten
            finally:
                store.delete([name])
        except _Overwritten:
            raise ConfigError(
                f"{self.uri} overwrites files although they exist (it ignores If-None-Match): two pipelines would lose "
                "each other's commits. Use a store with conditional writes"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"cannot write to {self.uri}: {first_line(error)}: check the address, the credentials and permissions"
            ) from error


class _Overwritten(BaseException):
    """A file that existed was written again."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error: the Rust libraries add dozens that are for their developers."""
    return one_line(str(error).partition("\n")[0], 300)


@lru_cache(maxsize=256)
def _opened(
    uri: str, options: tuple[tuple[str, str], ...], *, is_written: bool = False, retries: int | None = None
) -> Any:
    from obstore.store import LocalStore, from_url

    if uri.startswith("/"):
        if not is_written and not os.path.isdir(uri):
            raise FileNotFoundError(uri)  # not cached: it may be created later
        return LocalStore(uri, mkdir=is_written)
    config = {key.lower(): value for key, value in options}
    known = {key.lower(): value for key, value in os.environ.items()} | config
    allow_http = any(known.get(key, "").lower() in ("true", "1") for key in ALLOW_HTTP)
    settings: dict[str, Any] = {
        "config": {key: value for key, value in config.items() if key not in ALLOW_HTTP} or None,
        "client_options": {"allow_http": allow_http},
    }
    if retries is not None:
        settings["retry_config"] = {"max_retries": retries}
    return from_url(uri, **settings)
