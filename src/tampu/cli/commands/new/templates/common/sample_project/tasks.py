"""The queue and its tasks. Programs import this module to add jobs, workers to run them."""

from collections import Counter
from datetime import timedelta

from tampu import BackoffSpec, Queue

# The server is TAMPU_URL, or redis://127.0.0.1:6379.
queue = Queue("sample-project")


@queue.task(attempts=5, backoff=BackoffSpec.exponential(timedelta(seconds=1)), timeout=30)
async def send_welcome(email: str) -> str:
    """Send a welcome email. If it fails, it is retried; after 5 attempts the job becomes a dead letter."""
    return f"welcome sent to {email}"


@queue.task(timeout=60)
def count_words(text: str) -> dict[str, int]:
    """Count words. A `def` runs in a thread, so it may block; `process=True` is for CPU work."""
    return dict(Counter(text.lower().split()))
