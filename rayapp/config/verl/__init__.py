"""Runs a verl configuration here: `rayapp config import-verl` and `rayapp train --verl`."""
