"""`tampu demo`: a small shop's day on an embedded server: orders, payments, e-mails, photos, reports.

`shop.py` holds the tasks, written as in any program; `day.py` says what happens when; `tally.py` counts events;
`view.py` shows the day and its summary; `command.py` runs it all.
"""
