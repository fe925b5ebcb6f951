"""Language models that carry their state from batch to batch, and the text that they read in order.

A model here has `CarriedState` modules; its data set gives each sample's stream, of which the next batch
holds the continuation.
"""
