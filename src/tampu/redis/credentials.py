"""User and password for a new connection: from the URL, from a callback, or from one of redis-py's providers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from tampu.errors import ConfigError
from tampu.redis.faults import Unreachable

if TYPE_CHECKING:
    from tampu.redis.settings import ConnectionSettings, Credentials


async def resolve_credentials(source: Any, server: str | None) -> Credentials:
    """(user, password) from a provider or callback, which is asked anew for every connection."""
    if not hasattr(source, "get_credentials_async") and not callable(source):
        raise ConfigError(f"credential_provider must be a callable or a redis-py CredentialProvider; got {source!r}")
    try:
        answer: Any = source.get_credentials_async() if hasattr(source, "get_credentials_async") else source(server)
        if inspect.isawaitable(answer):
            answer = await answer
    except Exception as error:
        # Whoever hands out the tokens may be down for a moment, as any server may.
        raise Unreachable(f"credential_provider failed: {error!r}") from error
    if isinstance(answer, tuple) and len(answer) == 1:
        return None, answer[0]
    if isinstance(answer, tuple) and len(answer) == 2:
        return answer
    raise ConfigError("credential_provider must give (user or None, password or None)")


async def credentials_for(settings: ConnectionSettings, server: str) -> Credentials:
    """What to send with AUTH to this server; (None, None) when it wants nothing."""
    if settings.credential_provider is not None:
        return await resolve_credentials(settings.credential_provider, server)
    return settings.username, settings.password
