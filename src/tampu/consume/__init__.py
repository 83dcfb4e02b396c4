"""Running jobs: read, hold, invoke the handler, settle the outcome."""
