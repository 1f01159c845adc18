"""Programs that write files of this repository: docs, alerts, a dashboard, manifests. The wheel does not contain
them.
"""
