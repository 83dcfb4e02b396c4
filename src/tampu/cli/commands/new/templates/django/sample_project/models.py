"""The tables."""

from django.db import models


class Signup(models.Model):
    """A person who signed up, and when the welcome was sent."""

    email = models.EmailField(unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    welcomed_at = models.DateTimeField(null=True)
