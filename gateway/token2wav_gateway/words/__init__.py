"""Words: the sentences of a text, and the times of words in its audio."""
