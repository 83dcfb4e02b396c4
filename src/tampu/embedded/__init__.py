"""An embedded Valkey server: `EmbeddedServer` for a program, `acquire` and `release` for shared use."""

from tampu.embedded.server import EmbeddedServer, acquire, join_throw_away, release

__all__ = ["EmbeddedServer", "acquire", "join_throw_away", "release"]
