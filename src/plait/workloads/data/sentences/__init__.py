"""Sentence pairs: text files, message catalogues or rules in, token numbers and reference texts out."""
