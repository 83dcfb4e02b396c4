"""The queue and its tasks. Views import this module to add jobs, workers to run them."""

from datetime import timedelta

from django.utils import timezone
from tampu import Queue

from sample_project.models import Signup

# The server is TAMPU_URL, or redis://127.0.0.1:6379.
queue = Queue("sample-project")


@queue.task
def send_welcome(signup_id: int) -> str:
    """Send a welcome email. If it fails, it is retried for six minutes; then the job becomes a dead letter."""
    signup = Signup.objects.get(pk=signup_id)
    signup.welcomed_at = timezone.now()
    signup.save(update_fields=["welcomed_at"])
    return f"welcome sent to {signup.email}"


@queue.task
def delete_old_signups(days: int = 365) -> int:
    """Delete signups older than this, and return how many."""
    limit = timezone.now() - timedelta(days=days)
    deleted, _ = Signup.objects.filter(created_at__lt=limit).delete()
    return deleted
