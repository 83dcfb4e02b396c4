"""`tampu worker`: one supervisor process and N worker processes.

```
supervisor ──spawns──► child 1 .. N     each imports app:queue and runs a Worker
    │  ▲                  │
    │  └──── link ────────┘             a socket pair: reports go up; it closes when the supervisor dies
    ├── signals: the first drains, the second abandons
    ├── reload:  restarts the children when a .py file changes
    └── health:  GET /health, GET /metrics
```
"""
