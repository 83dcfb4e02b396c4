"""The lake: the history of queues as Delta tables. Bronze is landed from queues; silver and gold are computed from it.

| module | what it does |
|---|---|
| `store`, `files`, `table`, `folder` | where files are; Parquet files; one Delta table; the lake and its versions |
| `bronze`, `silver`, `gold` | the definitions of the tables, and landing |
| `pipeline`, `incremental` | one run: land, merge, compute what changed, publish; which jobs, files and minutes |
| `repair`, `contracts` | dead letters repaired with SQL; rules that payloads must keep |
| `upkeep` | compaction, vacuum, retention, forgetting jobs |
| `rows`, `read`, `report`, `charts` | readers without Spark and with it; the HTML report |
"""
