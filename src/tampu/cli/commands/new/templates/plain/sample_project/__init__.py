"""sample-project: a queue, two tasks and a worker."""
