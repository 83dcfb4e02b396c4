"""`tampu doctor`: finds problems of the server and the queues, and says how to fix them.

`findings.py` defines a finding, `server.py` checks servers, `queues.py` checks queues, `workers.py` their
workers, `command.py` prints the result.
"""
