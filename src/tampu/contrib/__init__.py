"""Integrations with database frameworks. Each module imports its framework, and no other part of tampu imports these.

| module | install | what it does |
|---|---|---|
| `tampu.contrib.sqlalchemy` | `tampu[sqlalchemy]` | add jobs when a SQLAlchemy session commits |
| `tampu.contrib.django` | `tampu[django]` | add jobs when a Django transaction commits |
| `tampu.contrib.django.tasks` | `tampu[django]` | a backend for `django.tasks` |
"""
