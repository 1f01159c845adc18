"""Judges: models that score answers, called over HTTP (docs/judges.md)."""
