"""The worker, with its settings: tampu worker sample_project.worker:worker"""

from tampu import Worker

from sample_project.tasks import queue

# Each process runs up to 20 jobs at the same time; `--processes 4` starts four processes.
worker = Worker(queue, concurrency=20)
