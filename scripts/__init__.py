"""Programs that write files of this repository: docs, alerts, a dashboard, manifests. Not in the wheel."""
