"""Another reward over what a run has sampled already."""
