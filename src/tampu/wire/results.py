"""Result values: exactly the MessagePack of what the handler returned.

None is stored as nil, so that "finished" and "not yet" differ; peers read it as None.
"""

from __future__ import annotations

from tampu.wire.payload import decode_value as decode_result
from tampu.wire.payload import encode_value as encode_result

__all__ = ["decode_result", "encode_result"]
