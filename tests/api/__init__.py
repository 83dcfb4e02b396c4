"""Tests of the API people use: Queue, tasks, Worker, QueueEvents, results, and the drop-in for chasquimq."""
