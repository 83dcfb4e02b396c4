"""Inspecting and changing stored data: job states, dead letters, repeatable jobs, results, snapshots."""
