"""Cron expressions: text to fields (`fields`), fields to days (`days`), the next fire (`schedule`), zones (`zones`)."""
