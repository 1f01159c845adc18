"""Translates GRPO runs of TRL: `rayapp.trl_config`."""
