"""The loops that one elected process runs for a queue: promoting due jobs, firing schedules."""
