"""Inspecting and changing stored data through one `QueueAdmin`: jobs, dead letters, schedules, results, snapshots."""
