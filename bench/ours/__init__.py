"""tampu's scenarios, named as in the original; `python -m bench.ours URL SERVER_PID` uses the protocol of all peers."""
