"""Connection settings from a URL: every form, and errors for invalid ones that never contain a password."""

from __future__ import annotations

import traceback

import pytest

from tampu.errors import ConfigError
from tampu.redis.settings import DEFAULT_URL, Address, ConnectionSettings, parse_url

SECRET = "s3cr3tpassw0rd"


@pytest.mark.parametrize(
    ("url", "kind", "tls", "addresses"),
    [
        ("redis://example", "single", False, [("example", 6379)]),
        ("redis://example:7000", "single", False, [("example", 7000)]),
        ("redis://", "single", False, [("127.0.0.1", 6379)]),
        ("redis://:7000", "single", False, [("127.0.0.1", 7000)]),
        ("redis://example:", "single", False, [("example", 6379)]),
        ("REDIS://example", "single", False, [("example", 6379)]),
        ("rediss://example", "single", True, [("example", 6379)]),
        ("valkey://example", "single", False, [("example", 6379)]),
        ("valkeys://example", "single", True, [("example", 6379)]),
        ("redis://[::1]", "single", False, [("::1", 6379)]),
        ("redis://user:pw@[fe80::1%eth0]:7000/3", "single", False, [("fe80::1%eth0", 7000)]),
        ("redis+sentinel://a/m", "sentinel", False, [("a", 26379)]),
        ("redis+sentinel://a:1,b,[::1]:3/m/2", "sentinel", False, [("a", 1), ("b", 26379), ("::1", 3)]),
        ("rediss+sentinel://a/m", "sentinel", True, [("a", 26379)]),
        ("redis+cluster://a:1,b:2", "cluster", False, [("a", 1), ("b", 2)]),
        ("rediss+cluster://a", "cluster", True, [("a", 6379)]),
    ],
)
def test_a_url_gives_the_address_and_the_kind(url: str, kind: str, tls: bool, addresses: list[tuple[str, int]]) -> None:
    settings = parse_url(url)
    assert settings.kind == kind
    assert settings.tls is tls
    assert [(address.host, address.port) for address in settings.addresses] == addresses


def test_the_default_url_is_the_local_server() -> None:
    assert parse_url(DEFAULT_URL) == ConnectionSettings(kind="single", addresses=(Address("127.0.0.1", 6379),))


@pytest.mark.parametrize(
    ("url", "username", "password"),
    [
        ("redis://h", None, None),
        ("redis://:pw@h", None, "pw"),
        ("redis://ada:pw@h", "ada", "pw"),
        ("redis://ada:p%40%2F%3A%23%3Fw@h", "ada", "p@/:#?w"),
        ("redis://ada:a:b@h", "ada", "a:b"),
        ("redis://ada:a@b@h", "ada", "a@b"),
        ("redis://ada:[x]@h", "ada", "[x]"),
        ("redis://h?username=ada&password=p%26w", "ada", "p&w"),
        ("redis://old:older@h?username=ada&password=pw", "ada", "pw"),
        ("unix://ada:pw@/tmp/x.sock", "ada", "pw"),
        ("redis+sentinel://ada:pw@h/m", "ada", "pw"),
        ("redis+cluster://ada:pw@h,i", "ada", "pw"),
    ],
)
def test_user_and_password_come_from_the_url_or_its_options(
    url: str, username: str | None, password: str | None
) -> None:
    settings = parse_url(url)
    assert (settings.username, settings.password) == (username, password)


@pytest.mark.parametrize(
    ("url", "db"),
    [
        ("redis://h", 0),
        ("redis://h/", 0),
        ("redis://h/7", 7),
        ("redis://h?db=7", 7),
        ("redis://h/3?db=7", 7),
        ("unix:///tmp/x.sock?db=7", 7),
        ("redis+sentinel://h/m/7", 7),
        ("redis+cluster://h/0", 0),
        ("embedded://?db=7", 7),
    ],
)
def test_the_database_is_the_path_or_an_option(url: str, db: int) -> None:
    assert parse_url(url).db == db


def test_the_text_of_a_socket_address_is_its_path() -> None:
    (address,) = parse_url("unix:///run/my%20redis/x.sock").addresses
    assert address.path == "/run/my redis/x.sock"
    assert str(address) == "/run/my redis/x.sock"


def test_a_sentinel_url_names_the_master_and_the_sentinels_own_login() -> None:
    settings = parse_url("redis+sentinel://h/mymaster?sentinel_username=watcher&sentinel_password=pw2")
    assert settings.master_name == "mymaster"
    assert (settings.sentinel_username, settings.sentinel_password) == ("watcher", "pw2")


@pytest.mark.parametrize(
    ("url", "data_dir"),
    [
        ("embedded://", None),
        ("embedded:///var/lib/x", "/var/lib/x"),
        ("embedded:///var/my%20lib/a@b", "/var/my lib/a@b"),
        ("embedded://data/here", "data/here"),
    ],
)
def test_an_embedded_url_may_name_a_data_directory(url: str, data_dir: str | None) -> None:
    settings = parse_url(url)
    assert (settings.kind, settings.data_dir, settings.addresses) == ("embedded", data_dir, ())


def test_the_tls_options_of_a_url() -> None:
    settings = parse_url(
        "rediss://h?ssl_ca_certs=/a@b/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem&ssl_check_hostname=False"
    )
    assert settings.ca_certs == "/a@b/ca.pem"
    assert (settings.certfile, settings.keyfile, settings.check_hostname) == ("/c.pem", "/k.pem", False)
    assert parse_url("rediss://h").check_hostname is True


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("", "url scheme"),
        ("localhost:6379", "url scheme"),
        ("http://h", "url scheme must be one of redis://"),
        ("redis://h:0", "url host"),
        ("redis://h:65536", "url host"),
        ("redis://h:port", "url host"),
        ("redis://[::1", "url host"),
        ("redis://::1", "url host"),
        ("redis+cluster://a,b:x", "url host"),
        ("redis://h/seven", "url database"),
        ("redis://h/-1", "url database"),
        ("redis://h/1.5", "url database"),
        ("redis://h/\u0663", "url database"),
        ("redis://h?db=seven", "url database"),
        ("redis+cluster://h/1", "url database must be 0 on a Cluster"),
        ("redis://h?decode_responses=1", "url option must be one of db"),
        ("redis://h?db", "url options must be name=value"),
        ("rediss://h?ssl_check_hostname=maybe", "ssl_check_hostname must be true or false"),
        ("redis://h?ssl_ca_certs=/ca.pem", "ssl_ca_certs requires TLS"),
        ("redis://h#x", "#"),
        ("unix://", "url must name the socket"),
        ("redis+sentinel://h", "url must name the master"),
    ],
)
def test_an_invalid_url_is_rejected_and_its_bad_part_named(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_url(url)
    assert caught.value.code == "CMQ-004"


@pytest.mark.parametrize("url", [None, 7, b"redis://:s3cr3tpassw0rd@h"])
def test_a_url_is_a_str(url: object) -> None:
    with pytest.raises(ConfigError, match="url must be a str") as caught:
        parse_url(url)  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "ada:{}@h:6379",
        "redis:/ada:{}@h",
        "ada:{}@h://x",
        "redis://ada:{}",
        "redis://ada:{}/x@h",
        "redis://ada:x/{}@h",
        "redis://ada:x@y/{}@h/0",
        "redis://ada:{}#x@h",
        "redis://ada:x#{}@h",
        "redis://ada:{}?x@h",
        "redis://ada:x?{}@h",
        "redis://ada:x?{}=1@h",
        "redis://ada:{}@h:port",
        "redis://ada:{}@h/seven",
        "redis://ada:{}@h?no=1",
        "redis://h?password={}&db=x",
        "redis+sentinel://ada:{}@h",
        "redis+sentinel://h?sentinel_password={}",
        "redis+cluster://ada:{}@h/3",
    ],
)
def test_a_password_never_appears_in_an_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url.format(SECRET))
    assert SECRET not in "".join(traceback.format_exception(caught.value))  # nor in an error it was made from


def test_a_password_never_appears_in_the_repr_of_settings() -> None:
    def provider(server: str | None) -> tuple[None, str]:
        return None, SECRET

    settings = parse_url(f"redis+sentinel://ada:{SECRET}@h/m?sentinel_password={SECRET}", credential_provider=provider)
    assert SECRET not in repr(settings)
    assert "provider" not in repr(settings)


def test_without_tls_there_is_no_tls_context() -> None:
    assert parse_url("redis://h").ssl_context is None


def test_a_missing_certificate_file_is_a_config_error_that_names_it() -> None:
    settings = parse_url("rediss://h?ssl_ca_certs=/no/such/ca.pem")
    with pytest.raises(ConfigError, match=r"/no/such/ca\.pem"):
        _ = settings.ssl_context
