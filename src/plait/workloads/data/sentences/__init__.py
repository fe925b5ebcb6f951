"""Sentences: text files, message catalogues or rules in, pairs of token numbers and their references out."""
