"""Profiler: an unmodified model and example inputs in, its layers with measured costs out.

`trace` finds the layers, `profile_model` measures their time and memory, `measure_links` the links between
workers. A `Profile` is data: print it, save it, plan with it.
"""

from plait.profiler.link_bandwidth import Link, measure_links
from plait.profiler.profile import Profile, load_profile, profile_model, save_profile
from plait.profiler.trace import trace
from plait.profiler.trace_errors import TraceError
from plait.profiler.traced_model import Layer, TracedModel, Value

__all__ = [
    "Layer",
    "Link",
    "Profile",
    "TraceError",
    "TracedModel",
    "Value",
    "load_profile",
    "measure_links",
    "profile_model",
    "save_profile",
    "trace",
]
