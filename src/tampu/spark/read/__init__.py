"""Reads queues as tables: plans the partitions on the driver, decodes entries to Arrow batches on the executors."""
