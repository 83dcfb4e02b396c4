"""tampu: a job queue and message broker on Redis Streams and MessagePack."""

__version__ = "0.1.0"
