"""The target, its text, and the feature store that every trial reads."""
