"""Language models that carry their state from batch to batch, in `CarriedState` modules.

Their data set provides the stream of each sample, which the next batch continues.
"""
