"""Published experiments, one module each: every one states its claims, measures, and shows what held."""
