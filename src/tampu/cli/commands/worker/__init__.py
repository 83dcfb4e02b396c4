"""`tampu worker`: one supervisor process and N worker processes.

```
supervisor ──spawns──► child 1 .. N     each imports app:queue and runs a Worker
    │  ▲                  │
    │  └──── link ────────┘             a socket pair: reports go up; its end tells the child that the supervisor died
    ├── signals: the first drains, the second abandons
    ├── reload:  .py files that changed
    └── health:  GET /health, GET /metrics
```
"""
