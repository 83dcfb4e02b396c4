"""Looking at a queue and changing what is stored: job states, dead letters, schedules, results, snapshots."""
