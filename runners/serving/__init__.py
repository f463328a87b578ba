"""A draft in a real serving engine: start it, let it decode, and hold its counters against the evaluator's."""
