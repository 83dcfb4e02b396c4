"""The worker, with its settings: tampu worker sample_project.worker:worker"""

import os

import django
from tampu import Worker

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sample_project.settings")
django.setup()

from sample_project.tasks import queue  # noqa: E402 - models can be imported after django.setup()

# Each process runs up to 20 jobs at the same time; `--processes 4` starts four processes.
worker = Worker(queue, concurrency=20)
