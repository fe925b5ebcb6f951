"""Translation: pairs of sentences as token numbers in, a GNMT model, its loss, translations and BLEU out.

The data sets of sentence pairs live in `plait.workloads.data.sentences`.
"""
