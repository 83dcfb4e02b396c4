"""Our scenarios, by the original's names; `python -m bench.ours URL SERVER_PID` is asked as any peer is."""
