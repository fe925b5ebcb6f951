"""Language models that carry their state from batch to batch, and the text that they read in order.

A model here has `CarriedState` modules; its data set provides the stream of each sample, which the next batch
continues.
"""
