"""`tampu doctor`: what is wrong with the server and the queues, and what to do about it.

`findings.py` says what a finding is, `server.py` looks at servers, `queues.py` at queues, `command.py` shows it all.
"""
