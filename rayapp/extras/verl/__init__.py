"""Import verl configurations: `rayapp config import-verl` and `rayapp train --verl`."""
