"""A web interface of the queues: `tampu dashboard`, or mounted in an ASGI application. Needs `tampu[dashboard]`.

app.mount("/tampu", dashboard("redis://localhost:6379", authorize=authorize))

| file | what it does |
|---|---|
| `app.py` | routes, answers as HTML and JSON, and what every request is checked for |
| `access.py` | who may look, who may act, and which requests are refused |
| `watch.py` | the poller that looks at all queues for all viewers |
| `actions.py` | what operators may change, each behind a page that asks |
| `pages/` | one function for each page; the templates are in `templates/` |
| `html.py`, `charts.py` | values and charts as safe HTML |
"""

from tampu.errors import ConfigError

try:
    import jinja2 as jinja2
    import starlette as starlette
except ImportError as error:
    raise ConfigError(
        f"the dashboard needs {error.name}, which is not installed: pip install 'tampu[dashboard]'"
    ) from error

from tampu.dashboard.access import Access as Access
from tampu.dashboard.app import dashboard as dashboard
