"""Workloads: a name and a few numbers in, a plain model, data set, loss or metric out.

Models are ordinary modules, a file per family, each with a `tiny` variant for CPU tests. Data sets are
map-style and come from `plait.workloads.data.build`, losses from `plait.workloads.losses.build_loss`.
Nothing here depends on processes, devices or plans.
"""
