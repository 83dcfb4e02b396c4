"""The loops that one elected process runs for a queue: promoting due jobs and firing repeatable jobs."""
