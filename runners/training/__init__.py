"""One draft: training, acceptance, decoding, and a trial as a plain function."""
