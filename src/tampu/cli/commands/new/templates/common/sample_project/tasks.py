"""The queue and its tasks. Programs import this module to add jobs, workers to run them."""

from collections import Counter

from tampu import Queue

# The server is TAMPU_URL, or redis://127.0.0.1:6379.
queue = Queue("sample-project")


@queue.task(timeout=30)
async def send_welcome(email: str) -> str:
    """Send a welcome email. If it fails, it is retried for six minutes; then the job becomes a dead letter."""
    return f"welcome sent to {email}"


@queue.task
def count_words(text: str) -> dict[str, int]:
    """Count words. A `def` runs in a thread, so it may block; `process=True` is for CPU work."""
    return dict(Counter(text.lower().split()))
