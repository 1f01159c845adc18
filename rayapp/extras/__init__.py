"""Holds features that a coding run does without, each in a folder of its own. The core never imports them: it reaches
them by name, through `rayapp.core.names.load_extra`, when a configuration or a command names one.
"""
