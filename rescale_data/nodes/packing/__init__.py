"""Documents to samples of one length: packed streams, whole documents, and the columns beside the tokens."""
