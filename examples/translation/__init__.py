"""Data of the GNMT examples: sentence pairs as token numbers, and the BLEU of a model's translations."""
