"""Data of the BERT examples: pre-training shards, SQuAD, and word pieces."""
