"""`tampu demo`: one day of a small shop on an embedded server: orders, payments, emails, photos and reports.

`shop.py` has the tasks, written as in any application; `day.py` says what happens when; `tally.py` counts events;
`view.py` shows the day and its summary; `command.py` runs the demo.
"""
