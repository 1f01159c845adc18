"""Models behind HTTP that say what responses are worth (docs/judges.md)."""
