"""Many drafts: the search file, the study, the runners of trials, and what was found."""
