"""Writes tables to queues: adds jobs without duplicates, replays dead letters."""
