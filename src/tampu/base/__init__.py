"""What everything stands on: argument checks, limits, the clock, event-loop helpers. Imports nothing but `errors`."""
