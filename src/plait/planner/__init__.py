"""Plan: a costed graph and a set of machines in, stages with replicas out.

Nothing here runs a model. A plan is data: print it, save it, compare it.
"""
