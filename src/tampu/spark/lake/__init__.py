"""The lake: the history of queues as Delta tables. Bronze is landed from queues; silver and gold are computed from it.

| module | what it does |
|---|---|
| `folder`, `table`, `versions` | the folder and its lock; one Delta table; the versions that belong together |
| `bronze`, `silver`, `gold`, `fingerprints` | the definitions of the tables, and landing |
| `pipeline`, `touched` | one run: land, compute what changed, publish; which jobs and files that is |
| `repair`, `contracts` | dead letters repaired with SQL; rules that payloads must keep |
| `upkeep` | compaction, vacuum, retention |
| `rows`, `read`, `report`, `charts` | readers without Spark and with it; the HTML report |
"""
