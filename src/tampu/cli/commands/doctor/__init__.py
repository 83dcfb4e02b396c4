"""`tampu doctor`: finds problems with the server and the queues, and shows how to fix them.

`findings.py` defines a finding, `server.py` checks servers, `queues.py` checks queues, `workers.py` their
workers, `command.py` prints the result.
"""
