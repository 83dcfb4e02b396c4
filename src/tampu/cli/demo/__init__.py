"""`tampu demo`: a small shop's day on a server of its own: orders, payments, e-mails, photos, reports.

`shop.py` holds the tasks, as one writes them in any program; `day.py` what happens when; `tally.py` counts by the
events; `view.py` shows it live; `summary.py` what came of it.
"""
