"""Cron expressions: parsing (`fields`), matching days (`days`), the next fire (`schedule`), time zones (`zones`)."""
