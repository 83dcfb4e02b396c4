"""Message ids: the server's time in microseconds, in base 36, followed by 22 random characters of the sender's.

The server's script makes the first part. The second comes from here: Lua's own random numbers repeat after a restart.
"""

from __future__ import annotations

import math
import random
import re
import string

ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits
RANDOM_CHARS = 22
#: Digits of the time until about the year 2085.
TIME_CHARS = 10

#: A character for each byte. Some come a little more often, as 256 is no multiple of 62: 130.9 bits of chance, not 131.
_CHARACTERS = bytes(ord(ALPHABET[byte % len(ALPHABET)]) for byte in range(256))
_BASE36 = re.compile(r"[0-9a-zA-Z]{1,10}")


def random_part() -> bytes:
    """22 characters that no other message has. Python seeds `random` anew in a forked child."""
    return random.randbytes(RANDOM_CHARS).translate(_CHARACTERS)


def sent_ms(message_id: str) -> float:
    """When a message was sent, by its id: Unix time in ms, microseconds as a fraction; NaN if it does not say."""
    found = _BASE36.match(message_id)
    return int(found[0], 36) / 1000 if found else math.nan
