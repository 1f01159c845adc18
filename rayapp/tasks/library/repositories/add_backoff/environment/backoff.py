"""How long to wait between tries."""
