"""What is done with drafts: capture, training, acceptance, the search and its report."""
