"""What the mixture example needs besides its pipeline: two corpora and a tokenizer."""
