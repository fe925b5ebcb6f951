"""From a traced model and a plan's layers to modules that run, or to source that runs without Plait."""
