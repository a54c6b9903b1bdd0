"""One utterance at a time: which tokens, when to run, what to send."""
