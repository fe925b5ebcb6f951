"""The stages of a model that the workers of a pipeline hold: how they are made, filled and moved."""
