"""Profiler: an unmodified model and example inputs in, its layers with measured costs out.

`trace` finds the layers, `profile_model` times them and weighs their tensors, `measure_links` times the
wires between workers. A `Profile` is data: print it, save it, plan on it.
"""
