"""The embedded Valkey server: `EmbeddedServer` for one program, `acquire` and `release` for shared use."""

from tampu.embedded.server import EmbeddedServer, acquire, join_throw_away, release

__all__ = ["EmbeddedServer", "acquire", "join_throw_away", "release"]
