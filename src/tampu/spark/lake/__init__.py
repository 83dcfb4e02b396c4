"""The lake: the history of queues as Parquet tables. Bronze is a stream; silver and gold are computed from it.

```
bronze/events, bronze/dlq     as they were, by queue and by the day of the job
silver/jobs                   one row per job: created, first active, done; attempts, waits, outcome, last error
gold/throughput, latency, failures, slo, dlq_clusters
```
"""
