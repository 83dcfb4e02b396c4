"""Foundations used everywhere: argument checks, limits, the clock, event loops. Imports only `errors`."""
