"""How runs and specs are shown to people."""
