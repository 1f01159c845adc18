"""Judges: models behind HTTP that score responses (docs/judges.md)."""
